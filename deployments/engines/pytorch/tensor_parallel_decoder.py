"""Tensor parallelism: a decoder whose model is distributed over several GPUs of one replica.

The tensor-parallel plan of transformers splits weights by columns or rows. Each GPU computes some
of the heads and a part of each MatMul, and caches the keys and values of its heads. There is one
process per GPU. All processes run every call, and the first process returns the logits. Without
GPUs the processes share the CPU, which is for tests only.

Processes receive calls through pipes. They return the logits of decode steps through shared memory,
because logits are large. A MatMul waits for the partial results of the other processes, so a failed
process would block them. One failure therefore ends all processes.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.config import HardwareSettings
from deployments.engines.base import translate_errors
from deployments.engines.decoder import (
    DecoderInfo,
    DecoderSpec,
    Logits,
    TokenColumn,
    check_prompt,
)
from deployments.engines.pytorch.decoder import TorchDecoder
from deployments.engines.pytorch.devices import missing_torch_device, uses_cuda
from deployments.errors import EngineFailed, EngineLost

log = logging.getLogger("ray.serve.hundredfold")

# A fork would copy locks of other threads, and CUDA does not work in a forked process.
_PROCESSES = multiprocessing.get_context("spawn")
_SHUTDOWN_TIMEOUT_S = 5.0
# Name of the first reply in error messages. A process sends this reply once its shard is open.
_OPEN = "open"


class _ProcessReply(NamedTuple):
    """Result of a call in one process."""

    error: str | None = None
    logits: NDArray[np.float32] | None = None  # result of a prefill; decode steps use shared memory


@dataclass(frozen=True, slots=True)
class _WorkerSpec:
    """Description of a shard (one GPU's part of the model) for the process that opens it."""

    number: int
    rendezvous_file: Path  # file through which the processes of the group find each other
    logits: Any  # shared memory for the logits of a decode step, [slots * V]
    decoder: DecoderSpec
    hardware: HardwareSettings
    slots: int
    context: int


class _Worker(NamedTuple):
    process: SpawnProcess
    calls: Connection


class TensorParallelDecoder:
    """Decoder engine over several processes."""

    def __init__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
    ) -> None:
        context = min(context, spec.max_tokens)
        self.info = DecoderInfo(spec.compute_type, slots, context, spec.vocabulary)
        if reason := missing_torch_device(spec, hardware):
            raise EngineFailed(reason)
        self._logits = _PROCESSES.RawArray("f", slots * spec.vocabulary)
        self._workers: list[_Worker] = []
        # The rendezvous file must exist while the processes run: on GPUs a process may connect as
        # late as in the first MatMul.
        self._directory = tempfile.TemporaryDirectory()
        try:
            with translate_errors(spec.path.name):
                for number in range(spec.options.tensor_parallel_size):
                    worker = _WorkerSpec(
                        number=number,
                        rendezvous_file=Path(self._directory.name, "rendezvous"),
                        logits=self._logits,
                        decoder=spec,
                        hardware=hardware,
                        slots=slots,
                        context=context,
                    )
                    self._workers.append(_start_worker(worker))
            self._collect_replies(_OPEN)
        except BaseException:
            self._end(at_once=True)
            raise

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        check_prompt(self.info, ids, start)
        logits = self._call("prefill", slot, list(ids), start, all_logits=all_logits)
        assert logits is not None, "bug: the first process returns no logits"
        return logits

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        self._call("decode", ids, lengths)
        return _view_logits(self._logits, self.info)[: len(ids)].copy()

    def verify(self, slot: int, ids: Sequence[int], start: int) -> Logits:
        """Raise EngineFailed, because MatMuls round several tokens differently from one token."""
        raise EngineFailed(f"{self.info.compute_type}: verification is not supported")

    def copy(self, source: int, target: int, tokens: int) -> None:
        self._call("copy", source, target, tokens)

    def swap(self, first: int, second: int, tokens: int) -> None:
        self._call("swap", first, second, tokens)

    def close(self) -> None:
        self._end()

    def _end(self, *, at_once: bool = False) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.calls.close()  # an idle process ends when its pipe closes
        deadline_s = time.monotonic() + (0.0 if at_once else _SHUTDOWN_TIMEOUT_S)
        for worker in workers:
            worker.process.join(max(0.0, deadline_s - time.monotonic()))
            worker.process.kill()  # no effect on a process that has ended
        for worker in workers:
            worker.process.join()
        self._directory.cleanup()

    def _call(self, name: str, *arguments: Any, **named: Any) -> NDArray[np.float32] | None:
        if not self._workers:
            raise EngineLost(f"{self.info.compute_type}: the engine is closed")
        for worker in self._workers:
            # Sending to an ended process raises OSError. `_collect_replies` reports the process.
            with suppress(OSError):
                worker.calls.send((name, arguments, named))
        return self._collect_replies(name)

    def _collect_replies(self, name: str) -> NDArray[np.float32] | None:
        """Wait for the replies of all processes. Return the logits of the first process.

        If a process fails, ends all processes and raises EngineLost.
        """
        waiting = {worker.calls: number for number, worker in enumerate(self._workers)}
        logits = None
        while waiting:
            for calls in wait(list(waiting)):
                assert isinstance(calls, Connection), "bug: waited for something else"
                number = waiting.pop(calls)
                reply = _receive_reply(calls)
                if reply.error is not None:
                    self._end(at_once=True)
                    raise EngineLost(
                        f"{self.info.compute_type}: `{name}` failed in process {number}, "
                        f"which ends all processes of the model: {reply.error}"
                    )
                if number == 0:
                    logits = reply.logits
        return logits


def _receive_reply(calls: Connection) -> _ProcessReply:
    try:
        reply: _ProcessReply = calls.recv()
    except (EOFError, OSError):
        return _ProcessReply("the process has ended")
    return reply


def _start_worker(spec: _WorkerSpec) -> _Worker:
    parent_end, worker_end = _PROCESSES.Pipe()
    process = _PROCESSES.Process(
        target=_work, args=(spec, worker_end), name=f"generator-gpu-{spec.number}", daemon=True
    )
    process.start()
    worker_end.close()  # otherwise the parent would not see the pipe close when the process ends
    return _Worker(process, parent_end)


def _work(spec: _WorkerSpec, calls: Connection) -> None:
    """Run calls until one fails or the pipe closes. This is the main function of a process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _run_calls(spec, calls)
    except Exception as exc:
        log.exception("tensor-parallel process %d failed", spec.number)
        with suppress(OSError):  # the parent has closed the pipe
            calls.send(_ProcessReply(str(exc) or type(exc).__name__))


def _run_calls(spec: _WorkerSpec, calls: Connection) -> None:
    decoder = _open_shard(spec)
    shared = _view_logits(spec.logits, decoder.info)
    calls.send(_ProcessReply())
    while (call := _receive_call(calls)) is not None:
        name, arguments, named = call
        logits = getattr(decoder, name)(*arguments, **named)
        is_first = spec.number == 0
        if name == "decode" and is_first:
            shared[: len(logits)] = logits
        calls.send(_ProcessReply(logits=logits if name == "prefill" and is_first else None))


def _receive_call(calls: Connection) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """Return the next call, or None once the pipe is closed."""
    try:
        call: tuple[str, tuple[Any, ...], dict[str, Any]] = calls.recv()
    except (EOFError, OSError):
        return None
    return call


def _open_shard(spec: _WorkerSpec) -> TorchDecoder:
    """Join the process group, then open the shard of this process."""
    import torch
    import torch.distributed

    size, hardware = spec.decoder.options.tensor_parallel_size, spec.hardware
    os.environ["LOCAL_RANK"] = str(spec.number)  # transformers selects the GPU with this number
    backend: dict[str, Any] = {"backend": "gloo"}
    if uses_cuda(hardware):
        torch.cuda.set_device(spec.number)
        backend = {"backend": "nccl", "device_id": torch.device("cuda", spec.number)}
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would use a GPU otherwise
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        init_method=spec.rendezvous_file.as_uri(), rank=spec.number, world_size=size, **backend
    )
    threads = max(1, hardware.intra_op_threads // size)
    hardware = hardware.model_copy(update={"intra_op_threads": threads})
    return TorchDecoder(spec.decoder, hardware, slots=spec.slots, context=spec.context)


def _end_with_parent() -> None:
    """End this process when its parent ends.

    The closed pipe alone does not suffice: a process that is blocked in a MatMul does not read the
    pipe.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "bug: the process has no parent"
    wait([parent.sentinel])
    os._exit(1)


def _view_logits(buffer: Any, info: DecoderInfo) -> NDArray[np.float32]:
    return np.frombuffer(buffer, np.float32).reshape(info.slots, info.vocabulary)
