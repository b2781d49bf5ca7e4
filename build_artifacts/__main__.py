"""Commands of the compiler: `python -m build_artifacts COMMAND`, or through `hundredfold`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from deployments.terminal.command_line import CommandSpec, Program

COMMANDS: Mapping[str, CommandSpec] = {
    "build": CommandSpec("build_artifacts.commands.build", "Compile a model", "build,cpu"),
    "demo": CommandSpec(
        "build_artifacts.commands.demo", "Build the demo models that are missing", "build,cpu"
    ),
    "pull": CommandSpec(
        "build_artifacts.commands.pull",
        "Fetch and build a model, once for all who ask",
        "build,cpu",
    ),
    "drain": CommandSpec(
        "build_artifacts.commands.drain", "Build the models that wait in the queue", "build,cpu"
    ),
    "verify": CommandSpec(
        "build_artifacts.commands.verify",
        "Check the digests and the parity of a sealed model again",
        "build,cpu",
    ),
    "tune": CommandSpec(
        "build_artifacts.commands.tune",
        "Measure the candidates of a model on this host again",
        "build,cpu",
    ),
    "report": CommandSpec(
        "build_artifacts.commands.report",
        "Measure every stage of a build: size, accuracy, latency",
        "build,cpu,plots",
    ),
    "compact": CommandSpec(
        "build_artifacts.commands.compact", "Show what pruning left to remove", "build,cpu"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    program = Program(
        "python -m build_artifacts",
        "Compile a Hugging Face model into a verified artifact, tuned for this host.",
        COMMANDS,
    )
    return program.run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
