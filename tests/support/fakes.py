"""Stand-ins that behave: they implement our protocols and do what the test tells them to."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from deployments.config import MicroBatchSettings
from deployments.engines.base import EngineInfo
from deployments.errors import EngineFailed
from deployments.ingress.routing import MicroBatcher, SendMicroBatch, Submit
from deployments.messages import Batch, Call, CallBatch, Outcome, Outputs, TokenizedItem
from deployments.records import TokenizeRecord

R = TypeVar("R")

# A test that goes wrong must end, not hang.
TIMEOUT_S = 10.0


def item(marker: int, length: int = 1) -> TokenizedItem:
    """`length` tokens, all of them `marker`: the fake engine's answer to it is [marker]."""
    return build_item([marker] * length)


def build_item(ids: ArrayLike, second_segment_start: int | None = None) -> TokenizedItem:
    """An item of these token ids, of one segment unless a second one is said to start."""
    tokens = np.asarray(ids, dtype=np.int32)
    return TokenizedItem(
        tokens, len(tokens) if second_segment_start is None else second_segment_start
    )


def far_deadline() -> float:
    """A deadline (time.time) that no test reaches."""
    return time.time() + 60


async def wait_until(happened: Callable[[], bool]) -> None:
    """Let others work until `happened`; TimeoutError after TIMEOUT_S."""
    async with asyncio.timeout(TIMEOUT_S):
        while not happened():
            await asyncio.sleep(0.001)


class FakeEngine:
    """Answers every item with its own marker, and keeps the markers of every pass.

    A pass with a marker of `failing` fails as a whole; a marker of `nan` gets a row that is no
    number; with `held`, no pass ends before `release`.
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

    def release(self) -> None:
        """Let held passes go on."""
        self._open.set()

    def run(self, batch: Batch) -> Outputs:
        """One row per item."""
        markers = [int(marker) for marker in batch.input_ids[:, 0]]
        self.passes.append(markers)
        if not self._open.wait(TIMEOUT_S):
            raise TimeoutError("nobody released the engine")
        if set(markers) & set(self._failing):
            raise EngineFailed("this pass holds a marker that fails")
        rows = [np.nan if marker in self._nan else marker for marker in markers]
        return Outputs(np.array(rows, dtype=np.float32)[:, None])

    def close(self) -> None:
        """Nothing is held."""


class ScriptedEngine:
    """An engine whose every pass is `act`."""

    info = EngineInfo(compute_type="cpu-fake")

    def __init__(self, act: Callable[[Batch], Outputs]) -> None:
        self.run = act

    def close(self) -> None:
        """Nothing is held."""


class FakeClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class ListRecorder(Generic[R]):
    """A recorder of requests, or of passes, that keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[R] = []

    def record(self, what: R) -> None:
        """Keep it."""
        self.records.append(what)


class TokenizeLog:
    """An TokenizeRecorder that keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[TokenizeRecord] = []

    def record(self, done: TokenizeRecord) -> None:
        """Keep it."""
        assert done.tokenize_s >= 0
        self.records.append(done)


class HangingEncoder:
    """A EncoderClient that never answers, and counts who gave up on it."""

    def __init__(self) -> None:
        self.lists = 0
        self.given_up = 0

    async def infer(self, batch: CallBatch) -> list[Outcome]:
        """Wait for ever."""
        self.lists += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up += 1
        raise AssertionError("this is a bug: an event nobody sets was set")


@dataclass
class FailingEncoder:
    """A EncoderClient whose hop fails with `error`."""

    error: Exception

    async def infer(self, batch: CallBatch) -> list[Outcome]:
        """Fail."""
        raise self.error


def each_alone(send: SendMicroBatch, settings: MicroBatchSettings) -> Submit:
    """A `MicroBatcher` without company: every call is its own list."""

    async def collect(call: Call) -> Outcome:
        return (await send([call]))[0]

    return collect


def in_groups_of(size: int) -> MicroBatcher:
    """A `MicroBatcher` that sends calls on in lists of exactly `size`."""

    def batched(send: SendMicroBatch, settings: MicroBatchSettings) -> Submit:
        waiting: list[tuple[Call, asyncio.Future[Outcome]]] = []

        async def collect(call: Call) -> Outcome:
            future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            waiting.append((call, future))
            if len(waiting) == size:
                group = waiting[:]
                waiting.clear()
                outcomes = await send([call for call, _ in group])
                for (_, reply), outcome in zip(group, outcomes, strict=True):
                    reply.set_result(outcome)
            return await future

        return collect

    return batched
