"""Command of the preStop hook, `python -m cluster.kuberay.drain SECONDS`: this node ends soon.

Ray Serve then starts replicas on other nodes and stops those of this node, as soon as their
replacements run, or in time to end within SECONDS. Ray's default for the node would start a driver
in the pod to find out which node it is on; the command line of the raylet also tells it. Address
and token are in the environment that KubeRay gives to the container.
"""

from __future__ import annotations

import sys

from ray._private.services import find_node_ids
from ray.scripts.scripts import cli


def drain_node(seconds: int) -> None:
    """Announce the end of the only Ray node in this container; Ray cannot refuse it."""
    (node_id,) = find_node_ids()
    cli.main(
        [
            "drain-node",
            f"--node-id={node_id}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=Kubernetes ends the pod",
            f"--deadline-remaining-seconds={seconds}",
        ],
        standalone_mode=False,
    )


if __name__ == "__main__":
    drain_node(int(sys.argv[1]))
