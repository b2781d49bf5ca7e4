"""What a benchmark can refuse."""

from __future__ import annotations

from deployments.errors import ServeError


class BenchmarkError(ServeError):
    """The measurement cannot be made, or its answers were wrong; `hint` says what to do."""

    code = "benchmark_failed"

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint
