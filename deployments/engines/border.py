"""Where the exceptions of foreign engines end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deployments.errors import EngineFailed


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
