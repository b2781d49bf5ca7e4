"""CUDA graphs of torch: one launch replays all kernels of a call.

The kernels of a small call take less time than their launches from Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from deployments.config import HardwareSettings
from deployments.engines.decoder import DecoderSpec
from deployments.engines.pytorch.capture_lock import CaptureLock
from deployments.engines.pytorch.devices import has_group_kernels, uses_cuda

if TYPE_CHECKING:
    import torch

_WARM_UP_CALLS = 3  # before a capture, because libraries allocate memory in their first calls


class CapturedCall(NamedTuple):
    """The CUDA graph of a call. Any thread may replay it."""

    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream  # the stream on which the graph was captured

    def replay(self) -> None:
        self.graph.replay()


def capture(
    call: Callable[[], None], other: CapturedCall | None, lock: CaptureLock, *, waits: bool
) -> CapturedCall | None:
    """Capture `call`, whose inputs and outputs must be tensors at fixed addresses.

    The call must be repeatable, because it also runs several times for warm-up. If `waits` is
    False, return None while another model is being opened.

    `other` is another captured call of the same engine, if there is one. Both graphs then share a
    memory pool. This is safe, because the calls of an engine are sequential and leave at most their
    outputs in the pool. Only captures on one stream can share a pool, so all captures of an engine
    use one stream. No other engine uses this stream; by default, torch would capture all engines on
    the same stream.
    """
    import torch

    with lock.open_model():  # the first call may compile a module
        stream = torch.cuda.Stream() if other is None else other.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    pool = None if other is None else other.graph.pool()
    with lock.capture(waits=waits) as is_alone:
        if not is_alone:
            return None
        # Some threads, such as those of a library, do not take the lock. With "thread_local", their
        # CUDA calls do not end the capture.
        with (
            _keep_current_stream(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            call()
    return CapturedCall(graph, stream)


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
