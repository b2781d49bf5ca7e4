"""Encoder replica: one batch scheduler over the graphs of all models on one kind of device."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from itertools import islice
from typing import NamedTuple

from deployments.artifacts.types import Device
from deployments.batching.passes import build_probe_item, run_pass
from deployments.batching.replica_hooks import ReplicaHooks
from deployments.batching.scheduler import BatchScheduler
from deployments.capacity import Capacity
from deployments.config import AppArgs, BatchSettings
from deployments.engines import EncoderEngine, check_providers
from deployments.engines.cuda_errors import check_context
from deployments.errors import EngineFailed, ServeError, UnknownModel
from deployments.health import check_workers
from deployments.host.machine import usable_cores
from deployments.large_outputs import MAX_OUTPUT_VALUES, count_large_values
from deployments.load import Load
from deployments.messages import (
    BatchKey,
    CallOutcome,
    LoadedModel,
    ModelRef,
    TokenizedBatch,
    TokenizedCall,
    TokenizedItem,
)
from deployments.records import ForwardPassRecorder
from deployments.registry import RegisteredModel
from deployments.replicas.device_memory import open_device_memory
from deployments.replicas.encoder_calls import DecodedCalls, SubmittedCall
from deployments.replicas.model_pool import ModelLoader, ModelPool
from deployments.replicas.pinned_models import PinnedModels
from deployments.replicas.pool_memory import (
    count_arena_bytes,
    count_score_bytes,
    leave_room_for_arena,
)
from deployments.replicas.shared_engine import SharedEngine
from deployments.tasks import TASKS
from deployments.tokenization.encodings import measure_tokenizer
from deployments.tokenization.vocabulary import TokenVocabulary
from deployments.tuning.background import BackgroundTuner, Untuned
from deployments.tuning.costs import TuningTarget
from deployments.tuning.lone_passes import LonePassPlanner, measure_graphs
from deployments.tuning.opening import open_tuned_engine
from deployments.tuning.rounds import TuningRounds
from deployments.tuning.table_prices import TablePrices

log = logging.getLogger("ray.serve.hundredfold")

# Threads for long decodes. They mostly hold the interpreter lock, so more would not decode
# more. With one thread, a short decode would wait for a long one.
DECODE_THREADS = 4
# Bytes of an engine session besides its weights.
ENGINE_BYTES = 1 << 20


class _LoadedEncoder(NamedTuple):
    model: RegisteredModel
    vocabulary: TokenVocabulary | None
    untuned: Untuned


class EncoderReplica:
    """Replica that computes tokenized batches on one kind of device.

    Create it inside a running event loop.
    """

    def __init__(self, args: AppArgs, device: Device, recorder: ForwardPassRecorder) -> None:
        settings = args.encoders[device]
        self._device, self._settings = device, settings
        self._hang_timeout_s = args.hang_timeout_s
        check_providers(settings)
        self._event_loop = asyncio.get_running_loop()
        self._engines: dict[ModelRef, EncoderEngine] = {}  # engines of the loaded models
        self._output_values = Capacity(lambda: MAX_OUTPUT_VALUES, "values of large outputs")
        self._decode_threads = ThreadPoolExecutor(DECODE_THREADS, "decode")
        self._lone_passes = LonePassPlanner(
            threads=max(usable_cores(), settings.intra_op_threads),
            max_bytes=settings.lone_pass_bytes,
        )
        self._prices = TablePrices(lambda: self._scheduler.settings)
        self._scheduler = BatchScheduler(
            self._engines,
            BatchSettings(),
            concurrent_passes=settings.concurrent_passes,
            recorder=recorder,
            hooks=ReplicaHooks(
                self._lone_passes.plan,
                self._prices.estimate_s,
                lambda ref: self.pool.hold(ref),
                lambda ref: self.pool.release(ref),
                self._build_known_good,
            ),
        )
        self._pinned = PinnedModels(args, self._serves)
        self.pool = ModelPool(
            args.store_path(),
            ModelLoader(self._measure, self._load, self._close),
            leave_room_for_arena(settings.pool_bytes, device, settings.concurrent_passes),
            self._pinned.refs,
            device_memory=open_device_memory(args.gpu_memory, device),
        )
        self._pinned.load_into(self.pool)
        self._tuner = BackgroundTuner(self._use_tuning, lambda ref: ref in self._engines)
        self._tuning_rounds = TuningRounds(self._tuner, self._list_untuned)

    def start(self) -> None:
        """Load newly pinned models from now on, and start background tuning if it is configured."""
        self._pinned.start(self.pool)
        if self._settings.tune == "background":
            self._tuning_rounds.start()

    def configure(self, settings: BatchSettings) -> None:
        """Apply `settings` from the next pass on."""
        self._scheduler.settings = settings

    async def infer(self, batch: TokenizedBatch) -> list[CallOutcome]:
        """Return one outcome per call, in order. Cancelling drops the items still in the queue.

        If the model cannot be loaded, its error is the outcome of every call. A batch without calls
        only loads its model, and raises this error.
        """
        outcomes: dict[int, CallOutcome] = {}
        try:
            async with aclosing(self.stream(batch)) as parts:
                async for part in parts:
                    outcomes |= part
        except ServeError as error:
            if not batch.calls:
                raise
            return [error] * len(batch.calls)
        return [outcomes[index] for index in range(len(batch.calls))]

    async def stream(self, batch: TokenizedBatch) -> AsyncGenerator[dict[int, CallOutcome], None]:
        """Yield outcomes by call index: together those that one pass completes, see DecodedCalls.

        A batch without calls only loads its model. Raises the ServeError of a model that cannot be
        loaded. Closing the generator drops the items still in the queue.
        """
        async with self.pool.lease(batch.key.model, len(batch.calls)) as loaded:
            if not batch.calls:  # it only loads the model, and its key names no task
                return
            with self._lone_passes.overlaps:
                items = iter(batch.items())
                submitted: list[SubmittedCall | ServeError] = []
                try:
                    for call in batch.calls:
                        submitted.append(self._submit(batch.key, call, items, loaded))
                    decoded = DecodedCalls(
                        batch,
                        submitted,
                        loaded.model.manifest,
                        loaded.vocabulary,
                        self._decode_threads,
                    )
                    answered = 0
                    while answered < len(submitted):
                        outcomes = await decoded.take()
                        yield outcomes
                        answered += len(outcomes)
                finally:
                    self._drop(submitted)

    def _drop(self, submitted: Sequence[SubmittedCall | ServeError]) -> None:
        """Cancel the calls that are not computed yet, and release the space for large outputs."""
        for call in submitted:
            if isinstance(call, SubmittedCall):
                if call.outputs.cancel():
                    self._scheduler.clean()
                release = self._output_values.release
                call.drop_decoding(partial(release, call.large_values, call.tokenized.client))

    def _submit(
        self,
        key: BatchKey,
        call: TokenizedCall | ServeError,
        items: Iterator[TokenizedItem],
        loaded: _LoadedEncoder,
    ) -> SubmittedCall | ServeError:
        if isinstance(call, ServeError):
            return call
        unpooled = TASKS[key.task].unpooled
        call_items = list(islice(items, len(call.lengths)))
        try:
            values = count_large_values(call_items, loaded.model.manifest, unpooled=unpooled)
            self._output_values.reserve(values, call.client)
        except ServeError as error:
            return error
        try:
            outputs = self._scheduler.submit(
                key.model,
                call_items,
                call.deadline_s,
                unpooled=unpooled,
                client=call.client,
                priority=call.priority,
            )
        except BaseException as error:
            self._output_values.release(values, call.client)
            if isinstance(error, ServeError):
                return error
            raise
        return SubmittedCall(call, call_items, outputs, values)

    def measure_load(self, backlog: int = 0) -> Load:
        """Return the load; `backlog`: tokens that wait for this replica in other processes."""
        return self._scheduler.measure_load(backlog)

    async def check_health(self) -> None:
        """Raise EngineFailed if Ray Serve must replace this replica."""
        check_context()
        check_workers(self._scheduler.health.values(), self._hang_timeout_s)

    async def close(self) -> None:
        """Finish accepted calls, then release the engines."""
        self._pinned.close()
        self._tuning_rounds.close()
        await asyncio.to_thread(self._tuner.close)
        await self._scheduler.drain()
        await self.pool.close()
        self._lone_passes.close()
        self._decode_threads.shutdown(wait=False)

    def _serves(self, model: RegisteredModel) -> bool:
        has_candidate = model.manifest.candidate_for(self._device) is not None
        return has_candidate and not model.is_generative

    def _target(self, model: RegisteredModel) -> TuningTarget:
        return TuningTarget(model.directory, model.manifest, self._device, self._settings)

    def _measure(self, model: RegisteredModel) -> int:
        passes = self._settings.concurrent_passes
        arena = count_arena_bytes(self._device, passes)
        scores = count_score_bytes(model.manifest, self._device, passes)
        size = ENGINE_BYTES + arena + scores + measure_graphs(self._target(model))
        if self._device is Device.CPU and _needs_vocabulary(model):  # it is not in a GPU's memory
            size += measure_tokenizer(model.directory)
        return size

    def _load(self, model: RegisteredModel) -> _LoadedEncoder:
        """Open the engine of a model and probe it. Blocks."""
        if model.is_generative:
            raise UnknownModel(f"Model {model.ref.id} is not an encoder", field="model")
        model.manifest.verify(model.directory)
        target = self._target(model)
        engine, is_tuned, serving = open_tuned_engine(target)
        try:
            probe_engine(engine, model)
            vocabulary = TokenVocabulary(model.directory) if _needs_vocabulary(model) else None
            usual = () if is_tuned else (target,)
            untuned = Untuned(target, serving, usual + self._lone_passes.find_unmeasured(target))
        except BaseException:
            engine.close()
            raise
        self._read_tables(model.ref, target)
        self._engines[model.ref] = SharedEngine(engine)
        return _LoadedEncoder(model, vocabulary, untuned)

    def _read_tables(self, ref: ModelRef, target: TuningTarget) -> None:
        self._prices.add(ref, target)
        self._lone_passes.add(ref, target)

    def _list_untuned(self) -> list[tuple[LoadedModel, Untuned]]:
        listed = [(each, self.pool.get(each.ref)) for each in self.pool.list_loaded()]
        return [
            (each, loaded.untuned)
            for each, loaded in listed
            if loaded is not None and loaded.untuned.unmeasured
        ]

    def _close(self, ref: ModelRef, _: _LoadedEncoder) -> None:
        """Close the engine after its last pass. Blocks."""
        engine = self._engines.pop(ref)
        self._lone_passes.remove(ref)
        self._prices.remove(ref)
        self._scheduler.forget(ref)
        engine.close()

    def _build_known_good(self, ref: ModelRef) -> TokenizedItem:
        loaded = self.pool.get(ref)
        return build_probe_item(loaded.model.manifest.mask_token if loaded else None)

    def _use_tuning(
        self, ref: ModelRef, target: TuningTarget, open_new: Callable[[], EncoderEngine] | None
    ) -> None:
        """Apply tuning from another thread than that of the event loop."""
        applying = self._apply_tuning(ref, target, open_new)
        asyncio.run_coroutine_threadsafe(applying, self._event_loop).result()

    async def _apply_tuning(
        self, ref: ModelRef, target: TuningTarget, open_new: Callable[[], EncoderEngine] | None
    ) -> None:
        """Use a model's new cost tables; replace its engine first if `open_new` is given.

        Has no effect on a model that was evicted meanwhile. Raises the error of `open_new`, and
        ModelUnavailable if the device lacks memory; then the former engine and tables stay.
        """
        if ref not in self.pool:
            return
        async with self.pool.lease(ref) as loaded:  # it is not evicted meanwhile
            if open_new is not None:
                size = await asyncio.to_thread(self._measure, loaded.model)
                with self.pool.resizing(ref, size):
                    await asyncio.to_thread(self._swap_engine, ref, open_new)
            await asyncio.to_thread(self._read_tables, ref, target)
            self._scheduler.prices.forget(ref)  # its rates are relative to the former tables

    def _swap_engine(self, ref: ModelRef, open_new: Callable[[], EncoderEngine]) -> None:
        """Replace the engine of a leased model. Blocks."""
        # Running passes still use the former engine. It is closed here or after the last of them.
        self._engines[ref] = SharedEngine(open_new())


def _needs_vocabulary(model: RegisteredModel) -> bool:
    return any(task.needs_vocabulary for name, task in TASKS.items() if name in model.tasks)


def probe_engine(engine: EncoderEngine, model: RegisteredModel) -> None:
    """Run one pass. Raises EngineFailed if the pass fails, so that the version is not used."""
    (result,) = run_pass(engine, [build_probe_item(model.manifest.mask_token)], False).results
    if isinstance(result, ServeError):
        raise EngineFailed(f"model {model.ref.name} fails its probe: {result.message}")
