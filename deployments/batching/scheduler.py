"""The one place that knows both worlds: asyncio callers and blocking engines.

Not a loop in the literal sense: whenever an item arrives or a pass ends, `_dispatch` starts passes
until every engine thread is busy. There is no background task that could die unnoticed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.batching.batches import collate, plan
from deployments.config import BatchSettings
from deployments.engines.base import EncoderEngine
from deployments.errors import DeadlineExceeded, EngineFailed, Overloaded, ServeError, WrongTask
from deployments.messages import ModelRef, Timings, TokenizedItem
from deployments.records import ForwardPassRecord, ForwardPassRecorder


@dataclass(frozen=True, slots=True)
class CallOutputs:
    """A call's part of the engine's output."""

    rows: Sequence[NDArray[np.float32]]  # one array per item, as in Outputs, in the call's order
    compute_type: str  # of the engine that ran, which need not be the model's engine any more
    timings: Timings


class _Kind(NamedTuple):
    """What one pass has only one of."""

    model: ModelRef
    unpooled: bool


@dataclass(slots=True)
class _PendingCall:
    """One submitted call until all of its items are done."""

    future: asyncio.Future[CallOutputs]
    deadline_s: float  # time.time
    rows: list[NDArray[np.float32] | None]
    missing: int
    tokens: int
    queue_s: float = 0.0
    forward_s: float = 0.0
    batch_items: int = 0


@dataclass(slots=True)
class _Item:
    tokens: TokenizedItem
    ticket: _PendingCall
    index: int
    arrived_s: float  # time.perf_counter


@dataclass(slots=True)
class _PassResult:
    """What one forward pass gave: a row or an error per item."""

    compute_type: str
    started_s: float
    results: list[NDArray[np.float32] | ServeError] = field(default_factory=list)
    forward_s: float = 0.0


class BatchScheduler:
    """Queues items per model and runs them in token-budget batches on engine threads.

    Bounded: more than `max_waiting_items` waiting items are refused. Use from one event loop. `engines`
    may change under way, from any thread: a pass keeps the engine it began with.
    """

    def __init__(
        self,
        engines: Mapping[ModelRef, EncoderEngine],
        rules: BatchSettings,
        *,
        runs: int,
        recorder: ForwardPassRecorder,
    ) -> None:
        self.rules = rules
        self._recorder = recorder
        self._engines = engines
        self._runs = runs
        self._busy = 0
        self._draining = False
        self._waiting: dict[_Kind, list[_Item]] = {}
        self._failures: dict[ModelRef, int] = {}
        self._pool = ThreadPoolExecutor(runs, thread_name_prefix="engine")

    @property
    def waiting_items(self) -> int:
        """Items not yet given to an engine."""
        return sum(map(len, self._waiting.values()))

    def submit(
        self,
        model: ModelRef,
        items: Sequence[TokenizedItem],
        deadline_s: float,
        *,
        unpooled: bool = False,
    ) -> asyncio.Future[CallOutputs]:
        """Queue the items of one call; the future gives their rows or raises a ServeError.

        With `unpooled` rows are [T, W] though the model pools, or WrongTask where its engine
        does not give them. Raises Overloaded at once when the line is full. Cancelling the future,
        or letting `deadline_s` (time.time) pass, drops what has not started.
        """
        if self._draining:
            raise Overloaded("this replica is stopping; try again")
        # Who finds nobody waiting is let in whatever the size: it would not fit later either.
        if self.waiting_items and self.waiting_items + len(items) > self.rules.max_waiting_items:
            raise Overloaded(f"{self.waiting_items} items wait already; try again later")
        ticket = _PendingCall(
            future=asyncio.get_running_loop().create_future(),
            deadline_s=deadline_s,
            rows=[None] * len(items),
            missing=len(items),
            tokens=sum(len(item.ids) for item in items),
        )
        now = time.perf_counter()
        line = self._waiting.setdefault(_Kind(model, unpooled), [])
        line.extend(_Item(tokens, ticket, i, now) for i, tokens in enumerate(items))
        # Not at once: the caller may be about to submit the rest of a list.
        asyncio.get_running_loop().call_soon(self._dispatch)
        return ticket.future

    async def drain(self) -> None:
        """Wait until nothing waits and nothing runs, then stop the threads."""
        self._draining = True
        while self._waiting or self._busy:
            await asyncio.sleep(0.01)
        self._pool.shutdown()

    def failures(self) -> int:
        """Passes of one model that failed altogether since one did not; the most of any model."""
        return max(self._failures.values(), default=0)

    def oldest_age_s(self) -> float:
        """How long the oldest waiting item has waited."""
        heads = [line[0].arrived_s for line in self._waiting.values() if line]
        return time.perf_counter() - min(heads) if heads else 0.0

    def _dispatch(self) -> None:
        while self._waiting and self._busy < self._places():
            kind = min(self._waiting, key=lambda k: self._waiting[k][0].arrived_s)
            batch = self._next_batch(kind)
            if batch:
                self._start(kind, batch)

    def _places(self) -> int:
        """Passes that may be under way: one per engine thread, and one ahead when many wait.

        The one ahead starts the moment a thread is free, however long this event loop is busy
        handing rows back. With few waiting it would only tear a batch apart.
        """
        return self._runs + (self.waiting_items >= self.rules.prefetch_from_items)

    def _next_batch(self, kind: _Kind) -> list[_Item]:
        line = [item for item in self._waiting.pop(kind) if _wanted(item.ticket)]
        if not line:
            return []
        idle_runs = max(1, self._runs - self._busy)
        chosen = plan([len(item.tokens.ids) for item in line], self.rules, idle_runs)
        batch = [line[i] for i in chosen]
        taken = set(chosen)
        if rest := [item for i, item in enumerate(line) if i not in taken]:
            self._waiting[kind] = rest
        return batch

    def _start(self, kind: _Kind, batch: list[_Item]) -> None:
        self._busy += 1
        items = [item.tokens for item in batch]
        running = asyncio.get_running_loop().run_in_executor(
            self._pool, _run, self._engines[kind.model], items, kind.unpooled
        )
        running.add_done_callback(lambda done: self._finish(kind.model, batch, done.result()))

    def _finish(self, model: ModelRef, batch: list[_Item], done: _PassResult) -> None:
        self._busy -= 1
        is_lost = all(isinstance(result, EngineFailed) for result in done.results)
        self._failures[model] = self._failures.get(model, 0) + 1 if is_lost else 0
        self._dispatch()  # first: handing rows back can wait, an idle engine thread cannot
        for item, result in zip(batch, done.results, strict=True):
            _deliver(item, result, done, len(batch))
        # Last: a failing metric must not keep callers waiting.
        lengths = [len(item.tokens.ids) for item in batch]
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
    """One forward pass in an engine thread; never raises.

    When a pass fails as a whole its items run again one by one, so that only the guilty fail.
    """
    done = _PassResult(engine.info.compute_type, started_s=time.perf_counter())
    if unpooled and not engine.info.supports_unpooled:
        done.results.extend([_unpooled_not_supported(engine)] * len(items))
        return done
    try:
        answers = engine.run(collate(items, unpooled=unpooled)).items
        if len(answers) != len(items):
            raise EngineFailed(f"{len(answers)} answers came back for {len(items)} items")
        done.results.extend(_reject_nonfinite(answers))
    except EngineFailed as error:
        if len(items) == 1:
            done.results.append(error)
        else:
            done.results.extend(_run(engine, [one], unpooled).results[0] for one in items)
    except Exception as error:  # noqa: BLE001  the caller must hear of it, whatever it is
        done.results.extend([EngineFailed(f"this is a bug: {error!r}")] * len(items))
    done.forward_s = time.perf_counter() - done.started_s
    return done


def _unpooled_not_supported(engine: EncoderEngine) -> WrongTask:
    return WrongTask(
        f"the model's {engine.info.compute_type} graph gives one vector for each text and none for "
        "its tokens; ONNX graphs that this release builds give both: build the model again"
    )


def _reject_nonfinite(
    answers: Sequence[NDArray[np.float32]],
) -> list[NDArray[np.float32] | ServeError]:
    """The answers, with an error in place of each that is not a finite number throughout."""
    if isinstance(answers, np.ndarray) and np.isfinite(answers.sum()):
        return list(answers)  # one cheap look at all of them
    broken = EngineFailed("the model's output is not a finite number")
    return [answer if np.isfinite(answer).all() else broken for answer in answers]


def _wanted(ticket: _PendingCall) -> bool:
    """Whether somebody still waits for this ticket; tells an expired one."""
    if ticket.future.done():
        return False
    if time.time() > ticket.deadline_s:
        ticket.future.set_exception(DeadlineExceeded("the deadline passed while waiting"))
        return False
    return True


def _deliver(
    item: _Item, result: NDArray[np.float32] | ServeError, done: _PassResult, batch_items: int
) -> None:
    ticket = item.ticket
    if ticket.future.done():
        return
    if isinstance(result, ServeError):
        ticket.future.set_exception(result)
        return
    ticket.rows[item.index] = result
    ticket.missing -= 1
    ticket.queue_s = max(ticket.queue_s, done.started_s - item.arrived_s)
    ticket.forward_s = max(ticket.forward_s, done.forward_s)
    ticket.batch_items = max(ticket.batch_items, batch_items)
    if ticket.missing == 0:
        timings = Timings(
            queue_s=ticket.queue_s,
            forward_s=ticket.forward_s,
            tokens=ticket.tokens,
            batch_items=ticket.batch_items,
        )
        rows = [row for row in ticket.rows if row is not None]
        ticket.future.set_result(CallOutputs(rows, done.compute_type, timings))
