"""Causes of exceptions."""

from __future__ import annotations


def list_causes(error: BaseException) -> list[BaseException]:
    """Return an error with its causes and contexts, and theirs."""
    found = [error]
    for each in found:  # which grows; `raise ... from ...` permits cycles
        for cause in (each.__cause__, each.__context__):
            if cause is not None and cause not in found:
                found.append(cause)
    return found
