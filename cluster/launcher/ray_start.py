"""`ray start` without Ray's client server, with a dashboard that starts late and is restarted.

Ray's own command waits seconds for the dashboard before it starts the raylet. With `--block` it
ends when the dashboard ends, although only operators use the dashboard. It also always starts the
client server, which only programs outside of the cluster use.
"""

from __future__ import annotations

import logging
import sys
from subprocess import Popen
from typing import Any

from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD
from ray.scripts.scripts import main

log = logging.getLogger(__name__)
find_dead_processes = Node.dead_processes
start_dashboard = Node.start_api_server


def keep_dashboard(node: Any) -> list[tuple[str, Popen[bytes]]]:
    """Start the dashboard if it is missing. Return the dead processes except the dashboard.

    `ray start` calls this function every second. It would end if the dashboard were returned.
    """
    dead: list[tuple[str, Popen[bytes]]] = find_dead_processes(node)
    dead_names = {name for name, _ in dead}
    if PROCESS_TYPE_DASHBOARD not in node.all_processes.keys() - dead_names:
        node.all_processes.pop(PROCESS_TYPE_DASHBOARD, None)
        try:
            start_dashboard(node, include_dashboard=True, raise_on_failure=True)
        except Exception:  # Ray raises a plain Exception, for instance for a used port
            log.warning("the dashboard does not start", exc_info=True)
    return [(name, process) for name, process in dead if name != PROCESS_TYPE_DASHBOARD]


def skip(_node: Any, **_options: Any) -> None:
    """Do nothing, in place of a function of Ray that starts a process."""


if __name__ == "__main__":
    Node.start_ray_client_server = skip
    Node.start_api_server = skip
    Node.dead_processes = keep_dashboard
    sys.exit(main())
