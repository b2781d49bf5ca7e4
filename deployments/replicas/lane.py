"""A lane: the batch loop over every model's graph for one kind of device."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from itertools import islice

from deployments.batching.loop import BatchLoop, CallRows
from deployments.config import AppArgs, BatchSettings, LaneSettings
from deployments.engines import Engine, check_lane, open_engine
from deployments.errors import EngineFailed, HardwareUnavailable, ServeError, UnknownModel
from deployments.manifest import Device
from deployments.messages import (
    Answer,
    EncodedBatch,
    EncodedCall,
    ModelRef,
    Outcome,
    TokenIds,
)
from deployments.records import PassRecorder
from deployments.registry import OpenModel, Registry
from deployments.tasks import TASKS

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
        self._engines, self._failed = registry.open_each(
            lambda model: _open_for(model, device, lane)
        )
        self._loop = BatchLoop(self._engines, BatchSettings(), runs=lane.runs, recorder=recorder)

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
        self, model: ModelRef, call: EncodedCall | ServeError, items: Iterator[TokenIds]
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
            compute_type=self._engines[model.ref].info.compute_type,
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
        await self._loop.drain()
        for engine in self._engines.values():
            engine.close()


def _open_for(model: OpenModel, device: Device, lane: LaneSettings) -> Engine:
    candidate = model.manifest.candidate_for(device)
    if candidate is None:
        raise HardwareUnavailable(
            f"Model {model.ref.id} has no graph for the {device} lane", field="options.use_gpu"
        )
    return open_engine(model.directory, candidate, lane)
