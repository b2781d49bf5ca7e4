"""Where the exceptions of foreign engines end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deployments.errors import EngineFailed

# Calls of one engine that fail one after the other, after which it is taken for lost and its
# replica replaced: one that has failed for good, such as a GPU after an illegal access, says the
# same as one whose input is to blame, and hardly anybody sends nothing else.
MOST_FAILURES = 10


@contextmanager
def failures_of(name: str) -> Iterator[None]:
    """Turn whatever an engine raises into EngineFailed about `name`; the original is the cause.

    Engines share no base class: ONNX Runtime's exceptions derive from Exception directly,
    OpenVINO's are what pybind makes of C++, torch and safetensors each have their own.
    """
    try:
        yield
    except Exception as exc:
        raise EngineFailed(f"{name}: {exc}") from exc
