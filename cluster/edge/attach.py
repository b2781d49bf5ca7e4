"""Stand-in that Serve's actor starts in place of HAProxy: `attach.py -db -f CONFIG ...`.

The stand-in sends the path of CONFIG to the edge (supervisor.py), which runs the real HAProxy and
applies CONFIG to it. The stand-in ends with the actor, or when a later stand-in replaces it. Every
change of the routes starts a new stand-in. It must start fast, so it runs without site packages.
"""

import ctypes
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run until the edge closes the connection. Return 1 if the edge refused CONFIG, else 0."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    config = arguments[arguments.index("-f") + 1]
    with socket.socket(socket.AF_UNIX) as edge:
        edge.connect(os.environ["HUNDREDFOLD_EDGE"])
        edge.sendall(os.fsencode(config) + b"\n")
        refusal = b""
        while chunk := edge.recv(65536):
            refusal += chunk
    sys.stderr.write(refusal.decode())
    return 1 if refusal else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
