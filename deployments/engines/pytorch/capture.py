"""CUDA graphs of torch: one launch replays all kernels of a call.

The kernels of a small call take less time than their launches from Python.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from deployments.config import HardwareSettings
from deployments.engines.cuda_errors import is_capture_failure
from deployments.engines.decoder import DecoderSpec
from deployments.engines.pytorch.capture_lock import CaptureLock
from deployments.engines.pytorch.capture_streams import CAPTURE_STREAMS
from deployments.engines.pytorch.devices import has_group_kernels, uses_cuda

if TYPE_CHECKING:
    import torch

log = logging.getLogger("ray.serve.hundredfold")

_UNENDED: list[torch.cuda.CUDAGraph] = []  # graphs of captures without an end, see _find_pool
_WARM_UP_CALLS = 3  # before a capture, because libraries allocate memory in their first calls


class CaptureFailed(Exception):
    """A call cannot be captured. It may run uncaptured."""


class CapturedCall(NamedTuple):
    """The CUDA graph of a call. Any thread may replay it."""

    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        self.graph.replay()


class EngineGraphs:
    """What all captures of one engine share: a stream and a memory pool.

    A shared pool is safe, because the calls of an engine are sequential and leave at most their
    outputs in the pool. Only captures on one stream can share a pool. No other engine uses this
    stream (capture_streams.py).
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._lacks_stream = False  # True: other engines use all streams
        # Also failed ones. The end of a graph frees workspaces of cuBLAS on the stream, whose
        # addresses are in the other graphs of the stream.
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool: Any = None  # None: the next capture has a new pool

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream. Raises CaptureFailed if other engines used all of them at the first use."""
        if self._stream is None and not self._lacks_stream:
            self._stream = CAPTURE_STREAMS.take()
            self._lacks_stream = self._stream is None
            if self._lacks_stream:
                log.warning("an engine runs uncaptured: other engines use all streams of torch")
        if self._stream is None:
            raise CaptureFailed("other engines use all streams of torch")
        return self._stream

    def record(self, call: Callable[[], None]) -> CapturedCall:
        """Capture `call` on the stream. Raises CaptureFailed, or the error of the call itself."""
        import torch

        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        # Some threads, such as those of a library, do not take the lock. With "thread_local", their
        # CUDA calls do not end the capture.
        graph_of_call = partial(torch.cuda.graph, graph, capture_error_mode="thread_local")
        try:
            with _keep_current_stream(), graph_of_call(pool=self._pool, stream=self.stream):
                call()
        except Exception as error:
            if not is_capture_failure(error):
                raise
            # Without the traceback: a handler of the log might keep it, and thus the graph.
            log.warning("a CUDA graph could not be captured; the call runs without: %s", error)
            raise CaptureFailed(str(error)) from error
        finally:
            self._pool = _find_pool(graph)
        return CapturedCall(graph)

    def drop(self) -> None:
        """Drop the graphs. The caller has dropped all captured calls."""
        self._graphs.clear()
        self._pool = None

    def give_back_stream(self) -> None:
        """Let other engines use the stream. Call this once no graph exists any more."""
        if self._stream is not None:
            CAPTURE_STREAMS.give_back(self._stream)
            self._stream = None


def _find_pool(graph: torch.cuda.CUDAGraph) -> Any:
    """Return the memory pool of a graph; None if its capture has no end.

    torch then still records to the pool, and refuses further captures in it. It also keeps a
    pointer to the graph, which must therefore exist as long as the process.
    """
    try:
        return graph.pool()
    except RuntimeError:
        _UNENDED.append(graph)
        return None


def capture(
    call: Callable[[], None], graphs: EngineGraphs, lock: CaptureLock, *, waits: bool
) -> CapturedCall | None:
    """Capture `call`, whose inputs and outputs must be tensors at fixed addresses.

    The call must be repeatable, because it also runs several times for warm-up. If `waits` is
    False, return None while another model is being opened. Raises CaptureFailed if the call cannot
    be captured, now or later.
    """
    import torch

    try:
        stream = graphs.stream
    except CaptureFailed:
        with lock.open_model():  # the first call may compile a module
            call()
        raise
    with lock.open_model():  # the first call may compile a module
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
    with lock.capture(waits=waits) as is_alone:
        return graphs.record(call) if is_alone else None


@contextmanager
def _keep_current_stream() -> Iterator[None]:
    """Make the current stream of the thread current again at the end of the block.

    `torch.cuda.graph` does so only if the capture ends without an error. Later calls of the thread
    would run on the stream of the captures, without waiting for earlier calls.
    """
    import torch

    previous = torch.cuda.current_stream()
    try:
        yield
    finally:
        torch.cuda.set_stream(previous)


def can_capture(spec: DecoderSpec, hardware: HardwareSettings) -> bool:
    """Return whether a decoder of torch captures its calls.

    A CUDA graph needs fixed addresses on the GPU, and neither communication between GPUs nor a wait
    for the GPU. Products of experts wait where torch has no kernel for them.
    """
    is_on_one_gpu = not spec.options.kv_offload and spec.options.tensor_parallel_size == 1
    if not uses_cuda(hardware) or not is_on_one_gpu:
        return False
    return not spec.generation_config.has_experts or has_group_kernels(spec.compute_precision)


def count_staging_slots(spec: DecoderSpec, hardware: HardwareSettings) -> int:
    """Return the number of staging slots: KV slots of a decoder that no request occupies.

    A decoder that captures prefills has one staging slot (decoder.py), others have none.
    """
    return int(spec.engine == "torch" and can_capture(spec, hardware))
