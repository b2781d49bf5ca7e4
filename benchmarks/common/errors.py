"""The exception with which a benchmark reports its failure."""

from __future__ import annotations

from deployments.terminal.command_line import HintedError


class BenchmarkError(HintedError):
    """A measurement failed or returned wrong answers. `hint` names the remedy."""

    code = "benchmark_failed"
