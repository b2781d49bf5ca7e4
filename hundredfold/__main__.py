"""The command line: `hundredfold COMMAND`, also `python -m hundredfold COMMAND`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from deployments.terminal.command_line import CommandGroup, CommandSpec, Program

EXAMPLES = """\
examples:
  hundredfold build BAAI/bge-small-en-v1.5      compile a model for this host
  hundredfold models ls                         list the artifacts of the store
  hundredfold serve --port 9000                 serve the models of serve_config.yaml
  hundredfold keys add alice --expires 90d      create an API key
  hundredfold check my_config.yaml              lint a Serve config
  hundredfold doctor                            what this host has, and what to do

exit codes: 0 success, 1 failed with a message, 2 wrong command line, 78 (`serve`) a config
that cannot be served, 130 interrupted
"""


def _load_commands(package: str) -> dict[str, Any]:
    """Return a package's commands, or {} if it is not installed, as in images for serving."""
    if importlib.util.find_spec(package) is None:
        return {}
    return dict(importlib.import_module(f"{package}.__main__").COMMANDS)


def build_program() -> Program:
    """Arrange the commands of all installed packages in one tree."""
    cluster, compiler = _load_commands("cluster"), _load_commands("build_artifacts")
    benchmarks = _load_commands("benchmarks")
    tree: dict[str, CommandSpec | CommandGroup] = {"serve": cluster["serve"]}
    tree |= {name: compiler.pop(name) for name in ("build", "demo") if name in compiler}
    tree |= cluster
    if compiler:
        tree["models"] = CommandGroup(
            "Pull, list, check, measure, route and remove models",
            {**compiler, **cluster["models"].commands},
        )
    if benchmarks:
        tree["bench"] = CommandGroup("Measure this host and compare with other systems", benchmarks)
    tree["completion"] = CommandSpec(
        "hundredfold.completion", "Print a completion script for a shell"
    )
    return Program(
        "hundredfold",
        "Compile Hugging Face models for this host and serve them on Ray Serve.",
        tree,
        EXAMPLES,
        "cluster.configured_store:find_configured_store",
    )


def main(argv: Sequence[str] | None = None) -> int:
    return build_program().run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
