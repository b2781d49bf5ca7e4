"""One thread for all calls of an engine.

ONNX Runtime keeps CUDA graphs in a context per thread: another thread would capture each graph
again, in other memory. Concurrent passes of one engine on a GPU would not be faster, and would need
buffers of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from deployments.errors import EngineFailed

P = ParamSpec("P")
T = TypeVar("T")


class EngineThread:
    """A thread that runs the calls of one engine in the order of their submission."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on the thread. Return its result or raise its exception.

        Raises EngineFailed after `close`.
        """
        try:
            done = self._executor.submit(function, *args, **kwargs)
        except RuntimeError as exc:
            raise EngineFailed("the engine is closed") from exc
        try:
            return done.result()
        finally:
            # An exception refers to this frame. Together with the future, which refers to the
            # exception, they would keep the engine in memory until a garbage collection.
            del done

    def close(self) -> None:
        """Wait for the last call, then end the thread."""
        self._executor.shutdown()
