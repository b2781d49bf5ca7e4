"""The command line: `python -m benchmarks NAME`, also `hundredfold bench NAME`.

The command NAME is `benchmarks/NAME/command.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from deployments.terminal.command_line import CommandSpec, Program

_EXTRAS = "bench,build,cpu"
COMMANDS: Mapping[str, CommandSpec] = {
    "serving": CommandSpec(
        "benchmarks.serving.command", "Measure requests/s and latency over HTTP", _EXTRAS
    ),
    "neighbor": CommandSpec(
        "benchmarks.neighbor.command", "Measure a quiet client beside a loud one", _EXTRAS
    ),
    "keys": CommandSpec(
        "benchmarks.keys.command", "Measure refused keys, the cost of keys, a noisy key", _EXTRAS
    ),
    "quality": CommandSpec(
        "benchmarks.quality.command", "Measure task metrics through the server", _EXTRAS
    ),
    "profile": CommandSpec(
        "benchmarks.profile.command", "Measure CPU time and wake-ups of each process", _EXTRAS
    ),
    "rivals": CommandSpec(
        "benchmarks.rivals.command", "Measure other servers beside Hundredfold", _EXTRAS
    ),
    "overload": CommandSpec(
        "benchmarks.overload.command", "Offer more load than the server can answer", _EXTRAS
    ),
    "many-models": CommandSpec(
        "benchmarks.many_models.command", "Request thousands of models with memory for few", _EXTRAS
    ),
    "rollouts": CommandSpec(
        "benchmarks.rollouts.command", "Change versions under load, and kill replicas", _EXTRAS
    ),
    "engine": CommandSpec(
        "benchmarks.engine.command", "Measure an engine without server and tokenizer", _EXTRAS
    ),
    "graphs": CommandSpec(
        "benchmarks.graphs.command", "Compare candidate graphs of a model", _EXTRAS
    ),
    "tuning": CommandSpec(
        "benchmarks.tuning.command", "Check the choices of the tuner again", _EXTRAS
    ),
    "generation": CommandSpec(
        "benchmarks.generation.command", "Measure token streams beside other engines", _EXTRAS
    ),
    "autoscaling": CommandSpec(
        "benchmarks.autoscaling.command", "Replay a day of bursts against the policies", _EXTRAS
    ),
    "placement": CommandSpec(
        "benchmarks.placement.command", "Replay a day with hardware `auto`, CPU and GPU", _EXTRAS
    ),
    "gpu": CommandSpec("benchmarks.gpu.command", "Check and time GPU candidates on a GPU"),
    "stories": CommandSpec(
        "benchmarks.stories.command", "Measure what each technique is worth", _EXTRAS
    ),
    "tables": CommandSpec(
        "benchmarks.tables.command", "Generate the tables of README.md and docs/", _EXTRAS
    ),
    "faults": CommandSpec(
        "benchmarks.faults.command", "Kill and stop every process of a server under load", _EXTRAS
    ),
    "pods": CommandSpec(
        "benchmarks.pods.command",
        "Take away pods of Kubernetes, as containers, under load",
        _EXTRAS,
    ),
    "soak": CommandSpec(
        "benchmarks.soak.command", "Run mixed load with random kills for a long time", _EXTRAS
    ),
    "page": CommandSpec(
        "benchmarks.page.command", "Measure the page of a server in Chromium", "dev"
    ),
    "hostile": CommandSpec(
        "benchmarks.hostile.command", "Send malformed and oversized requests", _EXTRAS
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark. Return 0 after a measurement, 1 after a failure or a wrong answer.

    Some benchmarks also return 1 for a missed goal. The others only print it.
    """
    program = Program(
        "python -m benchmarks",
        "Measure this host. Results are printed as tables and written as JSON.",
        COMMANDS,
        store_finder="cluster.configured_store:find_configured_store",
    )
    return program.run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
