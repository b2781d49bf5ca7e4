"""Batch scheduler of an encoder replica between asyncio callers and blocking engines.

Each new call and each finished pass runs `_dispatch`, which starts passes until every engine
thread is busy. There is no background task, because its failure could remain unnoticed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from deployments.batching.batch_policy import LOOK_AHEAD, plan_batch
from deployments.batching.calls import BatchGroup, CallOutputs, QueuedCall, QueuedItem, deliver
from deployments.batching.deadline_admission import DeadlineAdmission
from deployments.batching.displacement import choose_displaced
from deployments.batching.passes import PassResult, check_unpooled, run_checked_pass
from deployments.batching.prices import MEASURED_PASSES, WorkPrices
from deployments.batching.recent_clients import RecentClients
from deployments.batching.replica_hooks import USUAL_PASS, LonePass, ReplicaHooks
from deployments.config import BatchSettings
from deployments.deadlines import remaining_s
from deployments.engines.base import EncoderEngine
from deployments.errors import DeadlineExceeded, Overloaded, ServeError, build_overloaded
from deployments.fair_queue import FairQueue
from deployments.health import ModelHealths
from deployments.host.thread_priority import lower_thread_priority
from deployments.load import BusyMeter, Load, WorkRate
from deployments.messages import ModelRef, Sender, TokenizedItem
from deployments.queue_cleaner import QueueCleaner
from deployments.records import ForwardPassRecord, ForwardPassRecorder
from deployments.safety_factor import Prediction

# A call is dropped if its waiting items are predicted to take more than DROP_FACTOR * the time to
# its deadline. The factor allows for errors of the prediction.
DROP_FACTOR = 1.1
# For each pass, consider enough items for this many full passes, to find items of similar length.
WINDOW_PASSES = 8


class BatchScheduler:
    """Scheduler that queues items fairly between clients and runs batches on engine threads.

    A token budget limits each batch. A call is refused if it would probably end after its deadline
    behind waiting calls. If the queue is full, a new call displaces calls whose turn is later, or
    is refused. An empty queue accepts every call. Use from one event loop. Any thread may change
    `engines` at any time: a pass keeps the engine with which it started.
    """

    def __init__(
        self,
        engines: Mapping[ModelRef, EncoderEngine],
        settings: BatchSettings,
        *,
        concurrent_passes: int,
        recorder: ForwardPassRecorder,
        hooks: ReplicaHooks,
    ) -> None:
        self.settings = settings
        self.health = ModelHealths()
        self._recorder = recorder
        self._engines = engines
        self._concurrent_passes = concurrent_passes
        self._hooks = hooks
        self._busy = 0
        self._running_s = 0.0  # predicted seconds of the passes that run
        self._meter = BusyMeter(concurrent_passes)
        self._token_rate = WorkRate()  # s per token, over all models and with all threads
        self.prices = WorkPrices(concurrent_passes, hooks.estimate_item)
        self._draining = False
        self._queue: FairQueue[QueuedItem] = FairQueue()  # costs are predicted seconds
        self._admission = DeadlineAdmission(self._queue)
        self._cleaner = QueueCleaner(self._queue, lambda item: item.call.future.done())
        self._clients = RecentClients()
        self._pool = ThreadPoolExecutor(concurrent_passes, "engine", lower_thread_priority)

    @property
    def waiting_items(self) -> int:
        """The number of items that no pass has taken yet."""
        return len(self._queue)

    def measure_load(self, backlog: int = 0) -> Load:
        """Return the share of engine threads in use, and the predicted time of all waiting items.

        The share is the mean since the previous call. `backlog` is the number of tokens, of any
        model, that wait outside this scheduler.
        """
        queued_s = self._queue.cost + self._token_rate.predict_s(backlog)
        return Load(self._meter.take(), queued_s)

    def submit(
        self,
        model: ModelRef,
        items: Sequence[TokenizedItem],
        deadline_s: float,
        *,
        unpooled: bool = False,
        client: str = "",
        priority: int = 0,
    ) -> asyncio.Future[CallOutputs]:
        """Queue the items of one call; the future returns their outputs or raises a ServeError.

        `unpooled` requests one vector per token, [T, `token_width`], from a pooling model. Raises
        WrongTask if the model's engine cannot return these. Raises Overloaded if the replica stops,
        or if the queue is full or too long for the deadline. Raises ModelUnavailable in quarantine.
        Items that have not started are dropped in three cases: the future is cancelled (`clean`),
        the deadline passes or cannot be kept, or a full queue needs room for earlier turns.
        """
        if self._draining:
            raise Overloaded("this replica is stopping; retry")
        if unpooled:  # check before the pass, where the error would count as an engine failure
            check_unpooled(self._engines[model])
        prices = [self.prices.price(model, len(item.ids)) for item in items]
        price = sum(prices)
        cost = self.prices.predict_s(model, price)
        sender = (client, priority)
        try:
            prediction = self._admit(model, len(items), cost, deadline_s, sender)
        except Overloaded:
            if not self._cleaner.clean():  # perhaps the queue is full of items of ended calls
                raise
            prediction = self._admit(model, len(items), cost, deadline_s, sender)
        call = QueuedCall(
            group=BatchGroup(model, unpooled),
            client=client,
            future=asyncio.get_running_loop().create_future(),
            deadline_s=deadline_s,
            rows=[None] * len(items),
            missing=len(items),
            tokens=sum(len(item.ids) for item in items),
            price=price,
            measured_at=self.prices.passes[model] + MEASURED_PASSES,
        )
        now_s, rate = time.perf_counter(), cost / price
        self._clients.start(sender, len(items), now_s)
        call.future.add_done_callback(partial(self._end, sender, len(items), prediction))
        for index, (tokens, item_price) in enumerate(zip(items, prices, strict=True)):
            queued = QueuedItem(tokens, call, index, item_price, now_s)
            self._queue.push(queued, cost=rate * item_price, client=client, priority=priority)
        # Dispatch later: the caller may submit the remaining calls of a micro-batch first.
        asyncio.get_running_loop().call_soon(self._dispatch)
        return call.future

    def _admit(
        self, model: ModelRef, items: int, cost: float, deadline_s: float, sender: Sender
    ) -> Prediction:
        """Predict the end of a call, and make room for it.

        Raises Overloaded or ModelUnavailable for the same reasons as `submit`.
        """
        prediction = self._admission.predict(cost, deadline_s, sender, self._running_s)
        health = self.health[model]
        health.check_quarantine()  # first, so that a refused call displaces no other call
        self._make_room(items, cost, *sender)
        health.admit()
        return prediction

    def forget(self, model: ModelRef) -> None:
        """Forget the measurements of a closed model, but keep the health of a failing model."""
        self.prices.forget(model)
        self.health.forget(model)

    def clean(self) -> None:
        """Schedule one traversal of the queue that removes the items of all ended calls."""
        self._cleaner.schedule()

    async def drain(self) -> None:
        """Refuse new calls, wait for the queue and the running passes, then stop the threads."""
        self._draining = True
        while self._queue or self._busy:
            await asyncio.sleep(0.01)
        self._pool.shutdown()

    def _end(
        self,
        sender: Sender,
        items: int,
        prediction: Prediction,
        done: asyncio.Future[CallOutputs],
    ) -> None:
        self._clients.end(sender, items)
        self._admission.record_end(prediction, done)

    def _make_room(self, items: int, cost: float, client: str, priority: int) -> None:
        """If the queue is full, reject the last of the calls that are behind the new call.

        Raises Overloaded if these calls free too few places.
        """
        limit, waiting = self.settings.max_waiting_items, len(self._queue)
        excess = waiting + items - limit
        # Accept an oversized call when the queue is empty; it would never fit otherwise.
        if not waiting or excess <= 0:
            return
        error = build_overloaded(
            f"The encoder queue is full: {waiting} items wait, the maximum is {limit}. "
            "Retry later.",
            self._queue.cost,
        )
        ahead = self._queue.count_ahead(cost=cost, client=client, priority=priority)
        if not (displaced := choose_displaced(self._queue, ahead, excess)):
            raise error
        self._reject([(call, error) for call in displaced])

    def _reject(self, errors: Sequence[tuple[QueuedCall, ServeError]]) -> None:
        """Fail calls, and remove their items from the queue in one traversal."""
        for call, error in errors:
            if not call.future.done():
                call.future.set_exception(error)
        rejected = {id(call) for call, _ in errors}
        self._queue.discard(lambda item: id(item.call) in rejected)

    def _dispatch(self) -> None:
        while (first := self._queue.first) is not None and self._busy < self._max_in_flight():
            # Consider a bounded number of items, so that a long queue takes no more time per pass.
            window = min(WINDOW_PASSES * self.settings.max_batch_items, LOOK_AHEAD)
            taken = self._queue.take(window, self._choose)
            calls = {id(item.call): item.call for item in taken}
            errors = [(call, self._check_deadline(call)) for call in calls.values()]
            if late := [(call, error) for call, error in errors if error is not None]:
                self._reject(late)
            if batch := [item for item in taken if not item.call.future.done()]:
                self._start(first.call.group, batch)

    def _check_deadline(self, call: QueuedCall) -> DeadlineExceeded | None:
        """Return the error of a call that cannot end in time; None for other calls.

        Measurements from before the arrival of the call do not suffice to drop it. The replica may
        be less busy now, and so faster.
        """
        if call.future.done():  # cancelled, or an item has failed
            return None
        left_s = remaining_s(call.deadline_s)
        model = call.group.model
        needed_s = self.prices.predict_s(model, call.price)
        if left_s < 0:
            message = "the deadline passed in the encoder queue"
        elif needed_s > DROP_FACTOR * left_s and self.prices.passes[model] >= call.measured_at:
            message = (
                f"the rest of the request takes about {needed_s:.1f} s, its deadline is in "
                f"{left_s:.1f} s. Send fewer or shorter texts."
            )
        else:
            return None
        return DeadlineExceeded(message)

    def _choose(self, items: list[QueuedItem]) -> list[int]:
        """Return the indices of the items of the next pass, all of the first item's group."""
        group, quota = items[0].call.group, self._quota(items[0])
        counts: Counter[str] = Counter()
        same: list[int] = []
        for index, item in enumerate(items):
            call = item.call
            if call.group == group and counts[call.client] < quota:
                counts[call.client] += 1
                same.append(index)
        idle_threads = max(1, self._concurrent_passes - self._busy)
        lengths = [len(items[index].tokens.ids) for index in same]
        return [same[index] for index in plan_batch(lengths, self.settings, idle_threads)]

    def _quota(self, first: QueuedItem) -> int:
        """Return how many items one client may have in a pass.

        While several clients send, the limit is the larger of two numbers: the items predicted to
        run in `client_pass_ms`, and half of the usual items of the client with the fewest. Thus a
        quiet client waits for short passes only, and the passes of equal clients are large. The
        limit is at least 1. While fewer clients send, it is LOOK_AHEAD, more than a pass holds.
        """
        fewest = self._clients.find_fewest_items(time.perf_counter())
        if fewest is None:
            return LOOK_AHEAD
        item_s = self.prices.predict_s(first.call.group.model, first.price)
        pass_s = self.settings.client_pass_ms / 1e3
        return max(int(pass_s / (item_s * self._concurrent_passes)), fewest // 2, 1)

    def _max_in_flight(self) -> int:
        """Return the limit of dispatched passes: one per engine thread, or one more (prefetched).

        A prefetched pass starts the moment a thread is free. With few waiting items, it would split
        a batch. With several clients, it would delay the items that a quiet client sends meanwhile.
        """
        waits = self.waiting_items >= self.settings.prefetch_from_items
        is_prefetching = waits and not self._clients.has_several(time.perf_counter())
        return self._concurrent_passes + is_prefetching

    def _start(self, group: BatchGroup, batch: list[QueuedItem]) -> None:
        for item in batch:
            item.call.price -= item.price
        items = [item.tokens for item in batch]
        lone = self._plan_if_alone(group, items)
        engine = lone.engine or self._engines[group.model]
        self._busy += 1
        price = sum(item.price for item in batch)
        cost = self.prices.predict_s(group.model, price)
        self._running_s += cost
        self._meter.start()
        self._hooks.hold_model(group.model)
        health = self.health[group.model]

        padded_tokens = len(items) * max(len(item.ids) for item in items)
        get_known_good = partial(self._hooks.get_known_good, group.model)

        def run() -> PassResult:
            with health.running(padded_tokens):
                return run_checked_pass(engine, items, group.unpooled, get_known_good)

        def finish(done: PassResult) -> None:
            self._finish(group.model, batch, cost, done, lone)

        if lone.is_brief:
            finish(run())
            return
        running = asyncio.get_running_loop().run_in_executor(self._pool, run)
        running.add_done_callback(lambda done: finish(done.result()))

    def _plan_if_alone(self, group: BatchGroup, items: list[TokenizedItem]) -> LonePass:
        if self._busy or self._queue or group.unpooled:
            return USUAL_PASS
        longest = max(len(item.ids) for item in items)
        return self._hooks.plan_lone_pass(group.model, len(items), longest)

    def _finish(
        self,
        model: ModelRef,
        batch: list[QueuedItem],
        cost: float,
        done: PassResult,
        lone: LonePass,
    ) -> None:
        """Account for a pass, and deliver its results."""
        self._busy -= 1
        self._running_s -= cost
        self._meter.end()
        self._hooks.release_model(model)
        health = self.health[model]
        if done.failure is None:
            health.record_success()
        else:
            health.record_failure(done.failure)
        try:
            self._dispatch()  # first: an idle engine thread costs more than a late result
        finally:
            for item, result in zip(batch, done.results, strict=True):
                deliver(item, result, done, len(batch))
            if any(isinstance(result, ServeError) for result in done.results):
                self._cleaner.schedule()  # the failed calls may have further items in the queue
            else:
                lone.record(done.forward_s)
        # Last: a failing recorder must not delay callers.
        lengths = [len(item.tokens.ids) for item in batch]
        # An engine for lone passes uses all cores, so it leaves no time for other passes.
        threads = self._concurrent_passes if lone.engine is not None else 1
        thread_s = threads * done.forward_s
        self._token_rate.record(sum(lengths), thread_s / self._concurrent_passes)
        self.prices.record(model, sum(item.price for item in batch), thread_s)
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
                waiting_s=self._queue.cost,
            )
        )
