"""Command of the preStop hook: `python -m cluster.kuberay.drain SECONDS` drains this Ray node.

Ray Serve then starts replicas on other nodes. It stops the replicas of this node when their
replacements run, or at the latest so early that they can end within SECONDS. The module reads the
node id from the command line of the raylet. Ray's own search for the id would start a driver in the
pod. KubeRay sets Ray's address and token in the environment of the container.
"""

from __future__ import annotations

import sys

from ray._private.services import find_node_ids
from ray.scripts.scripts import cli


def drain_node(seconds: int) -> None:
    """Announce to Ray that its only node in this container ends soon.

    Ray may reject a drain with the reason IDLE_TERMINATION, but never one with PREEMPTION.
    """
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
