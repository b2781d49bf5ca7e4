"""Failures of the launcher."""

from __future__ import annotations

from deployments.errors import ServeError


class CannotStart(ServeError):
    """The cluster cannot be started; `hint` says what to do about it."""

    code = "cannot_start"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
