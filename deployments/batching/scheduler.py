"""Batch scheduler of an encoder replica between asyncio callers and blocking engines.

Each arriving item and each finished pass calls `_dispatch`, which starts passes until every engine
thread is busy. There is no background task that could die unnoticed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.batching.batches import collate, plan_batch
from deployments.config import BatchSettings
from deployments.deadlines import is_expired
from deployments.engines.base import EncoderEngine
from deployments.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineLost,
    Overloaded,
    ServeError,
    WrongTask,
    hide_details,
)
from deployments.health import WorkerHealth
from deployments.load import BusyMeter, Load, WorkRate
from deployments.messages import EncoderTimings, ModelRef, TokenizedItem
from deployments.records import ForwardPassRecord, ForwardPassRecorder

log = logging.getLogger("ray.serve.hundredfold")


class LonePass(NamedTuple):
    """How a pass runs that is alone."""

    engine: EncoderEngine | None = None  # None: the model's usual one
    is_brief: bool = False  # short enough to run on the event loop


# Plans a pass of a model that runs alone, by items and padded tokens per item.
PlanLonePass = Callable[[ModelRef, int, int], LonePass]
_USUAL = LonePass()


@dataclass(frozen=True, slots=True)
class CallOutputs:
    """Outputs of the items of one call."""

    rows: Sequence[NDArray[np.float32]]  # one array per item, as in Outputs, in the call's order
    compute_type: str  # of the engine that ran; background tuning may have swapped it since
    timings: EncoderTimings


class _BatchGroup(NamedTuple):
    """Properties that all items of a pass share."""

    model: ModelRef
    unpooled: bool


@dataclass(slots=True)
class _PendingCall:
    """One submitted call until all of its items are computed."""

    future: asyncio.Future[CallOutputs]
    deadline_s: float  # see deployments.deadlines
    rows: list[NDArray[np.float32] | None]
    missing: int
    tokens: int
    queue_s: float = 0.0
    forward_s: float = 0.0
    batch_items: int = 0

    def is_live(self) -> bool:
        """Whether the caller still waits. Fails the future of an expired call."""
        if self.future.done():
            return False
        if is_expired(self.deadline_s):
            self.future.set_exception(DeadlineExceeded("the deadline passed in the encoder queue"))
            return False
        return True


@dataclass(slots=True)
class _QueuedItem:
    tokens: TokenizedItem
    call: _PendingCall
    index: int
    arrived_s: float  # time.perf_counter


@dataclass(slots=True)
class _PassResult:
    """Result of one forward pass: an array or an error per item."""

    compute_type: str
    started_s: float
    results: list[NDArray[np.float32] | ServeError] = field(default_factory=list)
    forward_s: float = 0.0


class BatchScheduler:
    """Queues items per model and runs them in token-budget batches on engine threads.

    The queue holds `max_waiting_items`. Use it from one event loop. `engines` may change at any
    time and from any thread: a pass keeps the engine it started with.
    """

    def __init__(
        self,
        engines: Mapping[ModelRef, EncoderEngine],
        settings: BatchSettings,
        *,
        concurrent_passes: int,
        recorder: ForwardPassRecorder,
        plan_lone_pass: PlanLonePass = lambda _model, _items, _tokens: _USUAL,
    ) -> None:
        self.settings = settings
        self.health = {model: WorkerHealth(model.id) for model in engines}
        self._recorder = recorder
        self._engines = engines
        self._concurrent_passes = concurrent_passes
        self._plan_lone_pass = plan_lone_pass
        self._busy = 0
        self._meter = BusyMeter(concurrent_passes)
        self._token_rates = {model: WorkRate() for model in engines}  # s per token, of all threads
        self._token_rate = WorkRate()  # of all models
        self._draining = False
        self._waiting: dict[_BatchGroup, list[_QueuedItem]] = {}
        self._pool = ThreadPoolExecutor(concurrent_passes, thread_name_prefix="engine")

    @property
    def waiting_items(self) -> int:
        """Items that no pass has taken yet."""
        return sum(map(len, self._waiting.values()))

    def load(self, backlog: int = 0) -> Load:
        """Return the share of engine threads in use, and the measured time of all that waits.

        `backlog` tokens wait elsewhere, of any model.
        """
        queued_s = sum(
            self._token_rates[group.model].predict_s(sum(len(item.tokens.ids) for item in items))
            for group, items in self._waiting.items()
        )
        return Load(self._meter.take(), queued_s + self._token_rate.predict_s(backlog))

    def submit(
        self,
        model: ModelRef,
        items: Sequence[TokenizedItem],
        deadline_s: float,
        *,
        unpooled: bool = False,
    ) -> asyncio.Future[CallOutputs]:
        """Queue the items of one call; the future returns their outputs or raises a ServeError.

        `unpooled` requests [T, W] from a pooling model; engines without support for it fail with
        WrongTask. Raises Overloaded if the queue is full, ModelUnavailable in quarantine.
        Cancelling the future, or passing `deadline_s`, drops the items that have not
        started.
        """
        if self._draining:
            raise Overloaded("this replica is stopping; retry")
        waiting, limit = self.waiting_items, self.settings.max_waiting_items
        # Accept an oversized call when the queue is empty; it would never fit otherwise.
        if waiting and waiting + len(items) > limit:
            raise Overloaded(
                f"The encoder queue is full: {waiting} items wait, the maximum is {limit}. "
                "Retry later."
            )
        self.health[model].admit()
        call = _PendingCall(
            future=asyncio.get_running_loop().create_future(),
            deadline_s=deadline_s,
            rows=[None] * len(items),
            missing=len(items),
            tokens=sum(len(item.ids) for item in items),
        )
        now_s = time.perf_counter()
        queue = self._waiting.setdefault(_BatchGroup(model, unpooled), [])
        queue.extend(_QueuedItem(tokens, call, i, now_s) for i, tokens in enumerate(items))
        # Deferred: the caller may submit the remaining calls of a micro-batch first.
        asyncio.get_running_loop().call_soon(self._dispatch)
        return call.future

    async def drain(self) -> None:
        """Wait until the queue is empty and no pass runs, then stop the threads."""
        self._draining = True
        while self._waiting or self._busy:
            await asyncio.sleep(0.01)
        self._pool.shutdown()

    def _dispatch(self) -> None:
        while self._waiting and self._busy < self._max_in_flight():
            group = min(self._waiting, key=lambda g: self._waiting[g][0].arrived_s)
            batch = self._next_batch(group)
            if batch:
                self._start(group, batch)

    def _max_in_flight(self) -> int:
        """Return the limit of dispatched passes: one per engine thread, plus one prefetched.

        A prefetched pass starts the moment a thread is free, even while the event loop is busy
        with results. With few waiting items it would only split a batch.
        """
        is_prefetching = self.waiting_items >= self.settings.prefetch_from_items
        return self._concurrent_passes + is_prefetching

    def _next_batch(self, group: _BatchGroup) -> list[_QueuedItem]:
        queue = [item for item in self._waiting.pop(group) if item.call.is_live()]
        if not queue:
            return []
        idle_threads = max(1, self._concurrent_passes - self._busy)
        indices = plan_batch([len(item.tokens.ids) for item in queue], self.settings, idle_threads)
        taken = set(indices)
        if remaining := [item for i, item in enumerate(queue) if i not in taken]:
            self._waiting[group] = remaining
        return [queue[i] for i in indices]

    def _start(self, group: _BatchGroup, batch: list[_QueuedItem]) -> None:
        items = [item.tokens for item in batch]
        lone = self._plan_if_alone(group, items)
        engine = lone.engine or self._engines[group.model]
        self._busy += 1
        self._meter.start()
        health = self.health[group.model]

        padded_tokens = len(items) * max(len(item.ids) for item in items)

        def run() -> _PassResult:
            with health.running(padded_tokens):
                return _run(engine, items, group.unpooled)

        if lone.is_brief:
            self._finish(group.model, batch, run())
            return
        running = asyncio.get_running_loop().run_in_executor(self._pool, run)
        running.add_done_callback(lambda done: self._finish(group.model, batch, done.result()))

    def _plan_if_alone(self, group: _BatchGroup, items: list[TokenizedItem]) -> LonePass:
        if self._busy or self._waiting or group.unpooled:
            return _USUAL
        longest = max(len(item.ids) for item in items)
        return self._plan_lone_pass(group.model, len(items), longest)

    def _finish(self, model: ModelRef, batch: list[_QueuedItem], done: _PassResult) -> None:
        self._busy -= 1
        self._meter.end()
        health = self.health[model]
        first = done.results[0]
        if isinstance(first, EngineFailed) and all(
            isinstance(result, EngineFailed) for result in done.results
        ):
            health.record_failure(first)
        else:
            health.record_success()
        self._dispatch()  # first: an idle engine thread costs more than a late result
        for item, result in zip(batch, done.results, strict=True):
            _deliver(item, result, done, len(batch))
        # Last: a failing recorder must not delay callers.
        lengths = [len(item.tokens.ids) for item in batch]
        for rate in (self._token_rate, self._token_rates[model]):
            rate.record(sum(lengths), done.forward_s / self._concurrent_passes)
        self._recorder.record(
            ForwardPassRecord(
                model=model.id,
                compute=done.compute_type,
                items=len(batch),
                tokens=sum(lengths),
                padded_tokens=max(lengths) * len(batch),
                queue_s=done.started_s - min(item.arrived_s for item in batch),
                forward_s=done.forward_s,
                waiting_items=self.waiting_items,
            )
        )


def _run(engine: EncoderEngine, items: list[TokenizedItem], unpooled: bool) -> _PassResult:
    """Run one forward pass in an engine thread; never raises."""
    done = _PassResult(engine.info.compute_type, started_s=time.perf_counter())
    if unpooled and not engine.info.supports_unpooled:
        done.results.extend([_unpooled_not_supported(engine)] * len(items))
        return done
    done.results.extend(_compute(engine, items, unpooled))
    done.forward_s = time.perf_counter() - done.started_s
    return done


def _compute(
    engine: EncoderEngine, items: list[TokenizedItem], unpooled: bool
) -> list[NDArray[np.float32] | ServeError]:
    """Run a pass. If it fails as a whole, run its halves, so that only the faulty items fail."""
    try:
        outputs = engine.run(collate(items, unpooled=unpooled)).items
        if len(outputs) != len(items):
            raise EngineFailed(f"the engine returned {len(outputs)} outputs for {len(items)} items")
        return _reject_nonfinite(outputs)
    except Exception as error:
        if len(items) == 1 or isinstance(error, EngineLost):
            log.error("%s: a pass failed", engine.info.compute_type, exc_info=error)
            return [hide_details(error)] * len(items)
    middle = len(items) // 2
    return [
        *_compute(engine, items[:middle], unpooled),
        *_compute(engine, items[middle:], unpooled),
    ]


def _unpooled_not_supported(engine: EncoderEngine) -> WrongTask:
    return WrongTask(
        f"the {engine.info.compute_type} graph of this model returns one vector per text, none per "
        "token. Build the model again: ONNX graphs of this release return both."
    )


def _reject_nonfinite(
    outputs: Sequence[NDArray[np.float32]],
) -> list[NDArray[np.float32] | ServeError]:
    """Replace each output that contains NaN or infinity by an error."""
    if isinstance(outputs, np.ndarray) and np.isfinite(outputs.sum()):
        return list(outputs)  # one cheap check for all of them
    error = EngineFailed("the model's output contains NaN or infinity")
    return [output if np.isfinite(output).all() else error for output in outputs]


def _deliver(
    item: _QueuedItem, result: NDArray[np.float32] | ServeError, done: _PassResult, batch_items: int
) -> None:
    call = item.call
    if call.future.done():
        return
    if isinstance(result, ServeError):
        call.future.set_exception(result)
        return
    call.rows[item.index] = result
    call.missing -= 1
    call.queue_s = max(call.queue_s, done.started_s - item.arrived_s)
    call.forward_s = max(call.forward_s, done.forward_s)
    call.batch_items = max(call.batch_items, batch_items)
    if call.missing == 0:
        timings = EncoderTimings(
            queue_s=call.queue_s,
            forward_s=call.forward_s,
            tokens=call.tokens,
            batch_items=call.batch_items,
        )
        rows = [row for row in call.rows if row is not None]
        call.future.set_result(CallOutputs(rows, done.compute_type, timings))
