#!/bin/sh
# HAProxy that ends with the Serve actor that started it. Ray does not know HAProxy: without this
# an orphan keeps the port after a crash and answers the next cluster's clients with errors.
exec setpriv --pdeathsig KILL "${HUNDREDFOLD_HAPROXY:?}" "$@"
