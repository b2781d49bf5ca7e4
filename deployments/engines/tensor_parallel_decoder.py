"""A decoder whose model is spread over several GPUs of its replica: tensor parallelism.

transformers' plan for the model says which weights are cut by columns and which by slots, so that
each GPU computes some of the heads and a part of each product, and keeps the keys and values of its
heads. A process for each GPU does every call; the first one answers. Where there are no GPUs they
share the CPU, which is no faster and is how it is tested.

The processes hear of calls through pipes. Logits of a step come back through memory that is shared,
because they are long. A process that fails may leave the others waiting for it inside of a product,
so one failure is the end of all of them.
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
from deployments.engines.torch_decoder import TorchDecoder
from deployments.engines.torch_engine import missing_torch_device, uses_cuda
from deployments.errors import EngineFailed, EngineLost

log = logging.getLogger("ray.serve.hundredfold")

# A fork would take the threads' locks along, and a GPU cannot be used behind one.
_PROCESSES = multiprocessing.get_context("spawn")
_ENDED_WITHIN_S = 5.0
_OPEN = "open"  # what a process reports on first


class _Reply(NamedTuple):
    """What became of a call in one process."""

    error: str | None = None
    logits: NDArray[np.float32] | None = None  # those that do not go through shared memory


@dataclass(frozen=True, slots=True)
class _Part:
    """What a process must know to do its share."""

    number: int
    rendezvous_file: Path  # a file by which the processes find each other
    answers: Any  # shared memory for the logits of a step, [slots x V]
    spec: DecoderSpec
    hardware: HardwareSettings
    slots: int
    context: int


class _Worker(NamedTuple):
    process: SpawnProcess
    calls: Connection


class TensorParallelDecoder:
    """A Decoder over several processes."""

    def __init__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
    ) -> None:
        context = min(context, spec.max_tokens)
        self.info = DecoderInfo(spec.compute_type, slots, context, spec.vocabulary)
        if reason := missing_torch_device(spec, hardware):
            raise EngineFailed(reason)
        self._answers = _PROCESSES.RawArray("f", slots * spec.vocabulary)
        self._workers: list[_Worker] = []
        # Held as long as they are: those on GPUs may meet as late as at their first product.
        self._directory = tempfile.TemporaryDirectory()
        try:
            with translate_errors(spec.path.name):
                for number in range(spec.options.tensor_parallel_size):
                    part = _Part(
                        number=number,
                        rendezvous_file=Path(self._directory.name, "meeting"),
                        answers=self._answers,
                        spec=spec,
                        hardware=hardware,
                        slots=slots,
                        context=context,
                    )
                    self._workers.append(_started(part))
            self._replies(_OPEN)
        except BaseException:
            self._end(at_once=True)
            raise

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        """Read a prompt, or the next part of one. Raises EngineFailed."""
        check_prompt(self.info, ids, start)
        logits = self._call("prefill", slot, list(ids), start, all_logits=all_logits)
        assert logits is not None, "the first process answers; this is a bug"
        return logits

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        """One more token for each of the first slots. Raises EngineFailed."""
        self._call("decode", ids, lengths)
        return _shared(self._answers, self.info)[: len(ids)].copy()

    def verify(self, slot: int, ids: Sequence[int], start: int) -> Logits:
        """Not here, as with one GPU. Raises EngineFailed."""
        raise EngineFailed(f"{self.info.compute_type}: the engine verifies no drafts")

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the memory of a slot. Raises EngineFailed."""
        self._call("copy", source, target, tokens)

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Swap the memory of two slots. Raises EngineFailed."""
        self._call("swap", first, second, tokens)

    def close(self) -> None:
        """End the processes, and what they hold with them."""
        self._end()

    def _end(self, *, at_once: bool = False) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.calls.close()  # one that waits for a call ends by itself
        ended_by_s = time.monotonic() + (0.0 if at_once else _ENDED_WITHIN_S)
        for worker in workers:
            worker.process.join(max(0.0, ended_by_s - time.monotonic()))
            worker.process.kill()  # does nothing to what has ended
        for worker in workers:
            worker.process.join()
        self._directory.cleanup()

    def _call(self, name: str, *arguments: Any, **named: Any) -> NDArray[np.float32] | None:
        if not self._workers:
            raise EngineLost(f"{self.info.compute_type}: the engine is closed")
        for worker in self._workers:
            # One that has ended hears nothing, which its reply will show.
            with suppress(OSError):
                worker.calls.send((name, arguments, named))
        return self._replies(name)

    def _replies(self, name: str) -> NDArray[np.float32] | None:
        """Wait for all processes; the logits of the first. Raises EngineLost."""
        waiting = {worker.calls: number for number, worker in enumerate(self._workers)}
        logits = None
        while waiting:
            for calls in wait(list(waiting)):
                assert isinstance(calls, Connection), "nothing else is waited for; this is a bug"
                number = waiting.pop(calls)
                reply = _received(calls)
                if reply.error is not None:
                    self._end(at_once=True)
                    raise EngineLost(
                        f"{self.info.compute_type}: `{name}` failed in process {number}, and so in "
                        f"all that share the model: {reply.error}"
                    )
                if number == 0:
                    logits = reply.logits
        return logits


def _received(calls: Connection) -> _Reply:
    try:
        reply: _Reply = calls.recv()
    except (EOFError, OSError):
        return _Reply("it has ended")
    return reply


def _started(part: _Part) -> _Worker:
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(
        target=_work, args=(part, theirs), name=f"generator-gpu-{part.number}", daemon=True
    )
    process.start()
    theirs.close()  # or nobody would be told when the process ends
    return _Worker(process, ours)


def _work(part: _Part, calls: Connection) -> None:
    """A process: do what is called until nobody can call any more."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _answer(part, calls)
    except Exception as exc:
        log.exception("process %d of those that share a model fails", part.number)
        with suppress(OSError):  # nobody listens any more
            calls.send(_Reply(str(exc) or type(exc).__name__))


def _answer(part: _Part, calls: Connection) -> None:
    decoder = _open_shard(part)
    shared = _shared(part.answers, decoder.info)
    calls.send(_Reply())
    while (call := _receive_call(calls)) is not None:
        name, arguments, named = call
        logits = getattr(decoder, name)(*arguments, **named)
        if name == "decode" and part.number == 0:
            shared[: len(logits)] = logits
        is_told = name == "prefill" and part.number == 0
        calls.send(_Reply(logits=logits if is_told else None))


def _receive_call(calls: Connection) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """The next call; None: there will be none."""
    try:
        call: tuple[str, tuple[Any, ...], dict[str, Any]] = calls.recv()
    except (EOFError, OSError):
        return None
    return call


def _open_shard(part: _Part) -> TorchDecoder:
    """This process's share of the model, once it has found the others."""
    import torch
    import torch.distributed

    tensor_parallel_size, hardware = part.spec.options.tensor_parallel_size, part.hardware
    os.environ["LOCAL_RANK"] = str(part.number)  # by which transformers takes a GPU
    how: dict[str, Any] = {"backend": "gloo"}
    if uses_cuda(hardware):
        torch.cuda.set_device(part.number)
        how = {"backend": "nccl", "device_id": torch.device("cuda", part.number)}
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or transformers would take a GPU all the same
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        init_method=part.rendezvous_file.as_uri(),
        rank=part.number,
        world_size=tensor_parallel_size,
        **how,
    )
    threads = max(1, hardware.intra_op_threads // tensor_parallel_size)
    hardware = hardware.model_copy(update={"intra_op_threads": threads})
    return TorchDecoder(part.spec, hardware, slots=part.slots, context=part.context)


def _end_with_parent() -> None:
    """A process inside of a product that waits for another one hears no pipe."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was started by one; this is a bug"
    wait([parent.sentinel])
    os._exit(1)


def _shared(answers: Any, info: DecoderInfo) -> NDArray[np.float32]:
    return np.frombuffer(answers, np.float32).reshape(info.slots, info.vocabulary)
