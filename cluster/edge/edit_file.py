"""Editor of HAProxy's configuration where Ray Serve runs HAProxy itself, as on Kubernetes.

`python -m cluster.edge.edit_file -db -f CONFIG ...` takes the arguments of HAProxy. The command
edits CONFIG and writes HAProxy's error files next to CONFIG.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.edge.error_files import write_errors
from cluster.edge.haproxy_config import ClientLimits, UnknownTemplate, edit

MARK = "# edited by hundredfold\n"


def main(arguments: Sequence[str]) -> int:
    """Edit the file in place. A file that is already edited stays unchanged.

    Return 1 if the file does not come from a known template of Ray Serve, else 0.
    """
    config = Path(arguments[arguments.index("-f") + 1])
    text = config.read_text(encoding="utf-8")
    if text.startswith(MARK):
        return 0
    try:
        edited = edit(text, write_errors(config.parent), ClientLimits())
    except UnknownTemplate as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    config.write_text(MARK + edited, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
