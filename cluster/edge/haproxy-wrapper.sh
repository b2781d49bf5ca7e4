#!/bin/sh
# What Ray Serve starts as HAProxy. Under `hundredfold serve` a small process that stands for it;
# else HAProxy, which ends with its parent: Ray does not know it, and an orphan would keep the port.
if [ -n "$HUNDREDFOLD_EDGE" ]; then
    exec "${HUNDREDFOLD_PYTHON:?}" -IS "${0%/*}/attach.py" "$@"
fi
exec setpriv --pdeathsig KILL "${HUNDREDFOLD_HAPROXY:?}" "$@"
