"""The command line: `python -m cluster COMMAND`, also under `hundredfold`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from deployments.terminal.command_line import CommandGroup, CommandSpec, Program, Tree

_KEYS = CommandGroup(
    "Create, list, change and revoke API keys",
    {
        "add": CommandSpec("cluster.keys:ADD", "Create an API key and print it once"),
        "ls": CommandSpec("cluster.keys:LIST", "List the API keys"),
        "change": CommandSpec(
            "cluster.keys:CHANGE", "Change scopes, models, end or limits of an API key"
        ),
        "revoke": CommandSpec("cluster.keys:REVOKE", "Remove an API key"),
    },
)
_MODELS = CommandGroup(
    "List, route, load and remove models",
    {
        "ls": CommandSpec("cluster.models.listing", "List the versions of a store"),
        "alias": CommandSpec("cluster.models.actions:ALIAS", "Let an alias name a version"),
        "promote": CommandSpec(
            "cluster.models.actions:PROMOTE", "Let a version answer all requests that name none"
        ),
        "rollback": CommandSpec("cluster.models.actions:ROLLBACK", "Undo the last promotion"),
        "split": CommandSpec(
            "cluster.models.actions:SPLIT", "Let a version answer a share of the requests"
        ),
        "shadow": CommandSpec(
            "cluster.models.actions:SHADOW",
            "Let a version compute a share of the requests again, to compare",
        ),
        "pin": CommandSpec(
            "cluster.models.actions:PIN", "Keep a model in the memory of the replicas"
        ),
        "unpin": CommandSpec(
            "cluster.models.actions:UNPIN", "Let the replicas forget a model while it is unused"
        ),
        "ps": CommandSpec(
            "cluster.models.remote:PS", "Show what the replicas of a server have in memory"
        ),
        "load": CommandSpec(
            "cluster.models.remote:LOAD", "Load a model into the replicas of a server"
        ),
        "unload": CommandSpec(
            "cluster.models.remote:UNLOAD", "Remove a model from the memory of the replicas"
        ),
        "rm": CommandSpec("cluster.models.actions:REMOVE", "Remove a model, or one version of it"),
        "gc": CommandSpec("cluster.models.actions:COLLECT", "Remove versions that nothing names"),
        "migrate": CommandSpec(
            "cluster.models.migration", "Write manifests of the previous schema in the present one"
        ),
    },
)
COMMANDS: Tree = {
    "serve": CommandSpec("cluster.launcher.command", "Start Ray on this host and serve a config"),
    "models": _MODELS,
    "keys": _KEYS,
    "doctor": CommandSpec(
        "cluster.doctor", "Describe this host: what was found, what it means, what to do"
    ),
    "check": CommandSpec("cluster.check", "Lint a Serve config strictly"),
    "render": CommandSpec(
        "cluster.kuberay.render", "Write the KubeRay RayService of a Serve config"
    ),
    "dashboard": CommandSpec("cluster.monitoring:DASHBOARD", "Print a dashboard for Grafana"),
    "alerts": CommandSpec("cluster.monitoring:ALERT_RULES", "Print alert rules for Prometheus"),
    "env": CommandSpec(
        "cluster.launcher.local_environment", "Print the environment that `ray start` needs"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    program = Program(
        "python -m cluster",
        "Run Hundredfold on a host or on Kubernetes.",
        COMMANDS,
        store_finder="cluster.configured_store:find_configured_store",
    )
    return program.run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
