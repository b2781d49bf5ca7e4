"""A lane: the batch loop over every model's graph for one kind of device."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from itertools import islice

from deployments.batching.loop import BatchLoop, CallRows
from deployments.config import AppArgs, BatchSettings
from deployments.engines import Engine, check_lane
from deployments.errors import EngineFailed, ServeError, UnknownModel
from deployments.manifest import Device
from deployments.messages import (
    Answer,
    EncodedBatch,
    EncodedCall,
    EncodedItem,
    ModelRef,
    Outcome,
)
from deployments.records import PassRecorder
from deployments.registry import Registry
from deployments.tasks import TASKS
from deployments.tuning.background import BackgroundTuning
from deployments.tuning.opening import open_best
from deployments.tuning.placement import Placement

log = logging.getLogger("ray.serve.hundredfold")

# An item that waits longer than this while the replica claims health: the engine hangs.
STUCK_AFTER_S = 60.0


class BatchReplica:
    """Runs encoded batches; deployed once per device."""

    def __init__(self, args: AppArgs, device: Device, recorder: PassRecorder) -> None:
        lane = args.lanes[device]
        self._device = device
        check_lane(lane)
        registry = Registry.of(args)
        self._models = {model.ref: model for model in registry.open_models()}
        places = {
            ref: Placement(model.directory, model.manifest, device, lane)
            for ref, model in self._models.items()
        }
        opened, self._failed = registry.open_each(lambda model: open_best(places[model.ref]))
        self._engines = {ref: engine for ref, (engine, _) in opened.items()}
        self._loop = BatchLoop(self._engines, BatchSettings(), runs=lane.runs, recorder=recorder)
        untuned = {ref: places[ref] for ref, (_, is_tuned) in opened.items() if not is_tuned}
        self._tuning = BackgroundTuning(untuned if lane.tune == "background" else {}, self._adopt)

    def start(self) -> None:
        """Tune, in the background, what nobody tuned for this host."""
        self._tuning.start()

    def configure(self, rules: BatchSettings) -> None:
        """Use other batching rules from the next pass on."""
        self._loop.rules = rules

    async def infer(self, batch: EncodedBatch) -> list[Outcome]:
        """One outcome per call, in order; a cancelled batch is dropped before the engine."""
        items = iter(batch.items())
        pending = [self._submit(batch.key.model, call, items) for call in batch.calls]
        try:
            return [
                await self._outcome(batch, call, future)
                for call, future in zip(batch.calls, pending, strict=True)
            ]
        finally:
            for future in pending:
                if isinstance(future, asyncio.Future):
                    future.cancel()

    def _submit(
        self, model: ModelRef, call: EncodedCall | ServeError, items: Iterator[EncodedItem]
    ) -> asyncio.Future[CallRows] | ServeError:
        if isinstance(call, ServeError):
            return call
        own = list(islice(items, len(call.lengths)))
        if model not in self._engines:
            unknown = UnknownModel(f"Model {model.id} is not loaded here", field="model")
            return self._failed.get(model, unknown)
        try:
            return self._loop.submit(model, own, call.deadline_s)
        except ServeError as error:
            return error

    async def _outcome(
        self,
        batch: EncodedBatch,
        call: EncodedCall | ServeError,
        pending: asyncio.Future[CallRows] | ServeError,
    ) -> Outcome:
        if isinstance(call, ServeError):
            return call
        if isinstance(pending, ServeError):
            return pending
        try:
            done = await pending
        except ServeError as error:
            return error
        model = self._models[batch.key.model]
        try:
            value = TASKS[batch.key.task].decode(done.rows, call.options, model.manifest)
        except Exception as error:
            log.error("decoding failed, this is a bug", exc_info=error)
            return EngineFailed(f"the answer could not be decoded: {error!r}")
        return Answer(
            value=value,
            compute_type=done.compute_type,
            truncated=call.truncated,
            timings=done.timings._replace(encode_s=batch.encode_s),
        )

    async def check(self) -> None:
        """Raise when the engine no longer takes work."""
        age_s = self._loop.oldest_age_s()
        if age_s > STUCK_AFTER_S:
            raise EngineFailed(f"{self._device} lane: an item has waited {age_s:.0f} s")

    async def close(self) -> None:
        """Finish what was accepted, then give the memory back."""
        await asyncio.to_thread(self._tuning.close)
        await self._loop.drain()
        for engine in self._engines.values():
            engine.close()

    def _adopt(self, model: ModelRef, engine: Engine) -> None:
        # The former engine is not closed: passes under way hold it, and the last one lets it go.
        self._engines[model] = engine
