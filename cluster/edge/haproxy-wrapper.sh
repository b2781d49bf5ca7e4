#!/bin/sh
# What Ray Serve starts as HAProxy. Under `hundredfold serve` a small process that stands for it;
# else HAProxy with an edited configuration. It ends with its parent: Ray does not know it, and an
# orphan would keep the port.
set -e
if [ -n "$HUNDREDFOLD_EDGE" ]; then
    exec "${HUNDREDFOLD_PYTHON:?}" -IS "${0%/*}/attach.py" "$@"
fi
"${HUNDREDFOLD_PYTHON:?}" -m cluster.edge.edit_file "$@"
exec setpriv --pdeathsig KILL "${HUNDREDFOLD_HAPROXY:?}" "$@"
