"""The command line: `python -m cluster COMMAND`, also under `hundredfold`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from deployments.command_line import CommandSpec, Program

COMMANDS: Mapping[str, CommandSpec] = {
    "up": CommandSpec("cluster.up", "Start Ray on this host and serve a config"),
    "check": CommandSpec("cluster.check", "Lint a Serve config strictly"),
    "render": CommandSpec(
        "cluster.kuberay.render", "Write the KubeRay RayService of a Serve config"
    ),
    "keys-add": CommandSpec("cluster.keys:ADD", "Create an API key and print it once"),
    "keys-ls": CommandSpec("cluster.keys:LIST", "List the API keys"),
    "keys-revoke": CommandSpec("cluster.keys:REVOKE", "Remove an API key"),
    "doctor": CommandSpec(
        "cluster.doctor", "Describe this host: what was found, what it means, what to do"
    ),
    "env": CommandSpec("cluster.local", "Print the environment that `ray start` needs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    program = Program("python -m cluster", "Run Hundredfold on a host or on Kubernetes.", COMMANDS)
    return program.run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
