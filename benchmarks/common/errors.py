"""Exception that all benchmarks raise."""

from __future__ import annotations

from deployments.errors import ServeError


class BenchmarkError(ServeError):
    """A measurement failed or returned wrong answers. `hint` names the remedy."""

    code = "benchmark_failed"

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint
