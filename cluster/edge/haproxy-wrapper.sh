#!/bin/sh
# Ray Serve starts this script as HAProxy. Under `hundredfold serve`, the script runs a stand-in for
# HAProxy (attach.py). Elsewhere it runs HAProxy with an edited configuration, and the kernel kills
# HAProxy when its parent ends. Ray itself would not end HAProxy, which would keep the port.
set -e
if [ -n "$HUNDREDFOLD_EDGE" ]; then
    exec "${HUNDREDFOLD_PYTHON:?}" -IS "${0%/*}/attach.py" "$@"
fi
"${HUNDREDFOLD_PYTHON:?}" -m cluster.edge.edit_file "$@"
exec setpriv --pdeathsig KILL "${HUNDREDFOLD_HAPROXY:?}" "$@"
