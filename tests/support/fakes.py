"""Fakes that implement the deployment protocols, scripted by tests."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from tokenizers import Encoding, Tokenizer

from deployments.deadlines import deadline_after
from deployments.engines.base import EngineInfo
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import EngineFailed
from deployments.ingress.micro_batches import (
    BuildSubmit,
    GetSettings,
    PendingCall,
    SendMicroBatch,
    SubmitCall,
)
from deployments.messages import Call, CallBatch, CallOutcome, CallResult, TokenizedItem
from deployments.records import TokenizeRecord
from deployments.transports.base import Deliver, EncoderClient
from tests.support.waiting import TIMEOUT_S

R = TypeVar("R")


def item(marker: int, length: int = 1) -> TokenizedItem:
    """Return an item of `length` tokens with id `marker`. FakeEngine returns [marker] for it."""
    return build_item([marker] * length)


def build_item(ids: ArrayLike, second_segment_start: int | None = None) -> TokenizedItem:
    tokens = np.asarray(ids, dtype=np.int32)
    return TokenizedItem(
        tokens, len(tokens) if second_segment_start is None else second_segment_start
    )


def far_deadline() -> float:
    return deadline_after(60.0)


async def collect_outcomes(client: EncoderClient, batch: CallBatch) -> list[CallOutcome]:
    """Return one outcome per call, in order. Fail if an outcome is missing."""
    outcomes: dict[int, CallOutcome] = {}
    await client.infer(batch, outcomes.__setitem__)
    return [outcomes[index] for index in range(len(batch.calls))]


async def wait_until(happened: Callable[[], bool]) -> None:
    """Run other tasks until `happened` returns True. Raise TimeoutError after TIMEOUT_S."""
    async with asyncio.timeout(TIMEOUT_S):
        while not happened():
            await asyncio.sleep(0.001)


class FakeEngine:
    """Engine that returns the marker (first token id) of every item and records all passes.

    A pass with a marker in `failing` fails. The output for a marker in `nan` is NaN. With `held`,
    passes wait for `release`.
    """

    info = EngineInfo(compute_type="cpu-fake")

    def __init__(
        self, *, failing: Collection[int] = (), nan: Collection[int] = (), held: bool = False
    ) -> None:
        self.passes: list[list[int]] = []
        self._failing = failing
        self._nan = nan
        self._open = threading.Event()
        if not held:
            self._open.set()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def run(self, batch: Batch) -> Outputs:
        markers = [int(marker) for marker in batch.input_ids[:, 0]]
        self.passes.append(markers)
        if not self._open.wait(TIMEOUT_S):
            raise TimeoutError("the test did not release the engine")
        if set(markers) & set(self._failing):
            raise EngineFailed("a failing marker is in this pass")
        rows = [np.nan if marker in self._nan else marker for marker in markers]
        return Outputs(np.array(rows, dtype=np.float32)[:, None])

    def close(self) -> None:
        pass


class ScriptedEngine:
    """An engine that calls `act` for every pass."""

    info = EngineInfo(compute_type="cpu-fake")

    def __init__(self, act: Callable[[Batch], Outputs]) -> None:
        self.run = act

    def close(self) -> None:
        pass


class GilFreeTokenizer:
    """A tokenizer without the methods that hold the GIL, except for texts of one character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        assert name != "decode", "`decode` holds the GIL"
        return getattr(self._tokenizer, name)

    def encode(self, text: str) -> Encoding:
        assert len(text) == 1, "`encode` holds the GIL"
        return self._tokenizer.encode(text)


class PanicException(BaseException):
    """Stand-in for the PanicException of Rust libraries, a class that cannot be imported."""


def fail_with(code: int) -> Callable[..., NoReturn]:
    """Return a function for the place of a system call. It raises the OSError of an errno."""

    def fail(*_: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return fail


class FakeClock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class ListRecorder(Generic[R]):
    """Recorder of requests or forward passes."""

    def __init__(self) -> None:
        self.records: list[R] = []

    def record(self, record: R) -> None:
        self.records.append(record)


class TokenizeLog:
    def __init__(self) -> None:
        self.records: list[TokenizeRecord] = []

    def record(self, done: TokenizeRecord) -> None:
        assert done.tokenize_s >= 0
        self.records.append(done)


class HangingEncoder:
    """An EncoderClient that never answers. It counts its micro-batches, and the cancelled ones."""

    def __init__(self) -> None:
        self.batches = 0
        self.cancelled = 0

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        self.batches += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1
        raise AssertionError("bug: the event was set")


class RecordingEncoder:
    """An EncoderClient that records every call and answers with a vector."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        self.calls += batch.calls
        for index in range(len(batch.calls)):
            deliver(index, CallResult(np.ones((1, 2), np.float32), "cpu-fake"))


@dataclass
class FailingEncoder:
    """An EncoderClient that raises `error`."""

    error: Exception

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        raise self.error


def send_unbatched(send: SendMicroBatch, _settings: GetSettings) -> SubmitCall:
    """Send each call in its own micro-batch. This function is a `BuildSubmit`."""

    async def collect(call: PendingCall) -> None:
        await send([call])

    return collect


def batch_by(size: int) -> BuildSubmit:
    """Return a `BuildSubmit` with exactly `size` calls per micro-batch.

    As with @serve.batch, a micro-batch runs in a separate task, so no caller can cancel it.
    """

    def batched(send: SendMicroBatch, _settings: GetSettings) -> SubmitCall:
        waiting: list[PendingCall] = []
        tasks: set[asyncio.Future[None]] = set()

        async def collect(call: PendingCall) -> None:
            waiting.append(call)
            if len(waiting) == size:
                tasks.add(asyncio.ensure_future(send(waiting[:])))
                waiting.clear()

        return collect

    return batched


class FakeTerminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True
