"""Encoder replica: one batch scheduler over the graphs of all models on one kind of device."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import islice

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device, ModelHead
from deployments.batching.calls import CallOutputs
from deployments.batching.scheduler import BatchScheduler
from deployments.capacity import Capacity
from deployments.config import AppArgs, BatchSettings
from deployments.engines import EncoderEngine, check_providers
from deployments.errors import InputTooLong, ServeError, hide_details
from deployments.health import check_workers
from deployments.load import Load
from deployments.machine import usable_cores
from deployments.messages import (
    BatchKey,
    CallResult,
    ModelRef,
    Outcome,
    TokenizedBatch,
    TokenizedCall,
    TokenizedItem,
)
from deployments.records import ForwardPassRecorder
from deployments.registry import ModelRegistry, load_error
from deployments.tasks import TASKS, DecodeContext
from deployments.tokenization.vocabulary import TokenVocabulary
from deployments.tuning.background import BackgroundTuner
from deployments.tuning.costs import TuningTarget
from deployments.tuning.lone_passes import LonePassPlanner
from deployments.tuning.opening import open_tuned_engine
from deployments.tuning.prices import TablePrices

log = logging.getLogger("ray.serve.hundredfold")

# Output values that are decoded on the event loop, in a few milliseconds; more take a thread.
INLINE_VALUES = 1 << 18
# Values of the token vectors of one call: 16 MB, three times that as JSON.
MAX_TOKEN_VALUES = 1 << 22
# Vocabulary scores of all masks of one call, held until its last pass ends: 512 MB. Masks are
# short to send: a body full of them would need 40 GB.
MAX_MASK_VALUES = 1 << 27
# Both kinds of values of all calls in the replica.
MAX_OUTPUT_VALUES = 1 << 27


@dataclass(frozen=True, slots=True)
class _Submitted:
    call: TokenizedCall
    items: Sequence[TokenizedItem]
    outputs: asyncio.Future[CallOutputs]
    large_values: int  # of outputs that count against the budget of the replica


class _DoneCalls:
    """Indices of the calls whose outputs are complete, in groups of those done at the same time."""

    def __init__(self, calls: Sequence[_Submitted | ServeError]) -> None:
        self._indices: list[int] = []
        self._changed = asyncio.Event()
        for index, call in enumerate(calls):
            if isinstance(call, ServeError):
                self._add(index)
            else:
                call.outputs.add_done_callback(partial(self._add, index))

    async def take(self) -> list[int]:
        await self._changed.wait()
        self._changed.clear()
        taken, self._indices = self._indices, []
        return taken

    def _add(self, index: int, _done: object = None) -> None:
        self._indices.append(index)
        self._changed.set()


class EncoderReplica:
    """Computes tokenized batches; deployed once per device."""

    def __init__(self, args: AppArgs, device: Device, recorder: ForwardPassRecorder) -> None:
        settings = args.encoders[device]
        self._hang_timeout_s = args.hang_timeout_s
        check_providers(settings)
        registry = ModelRegistry.of(args)
        self._registered = {model.ref: model for model in registry.open_models()}
        targets = {
            ref: TuningTarget(model.directory, model.manifest, device, settings)
            for ref, model in self._registered.items()
        }
        opened, self._failed = registry.load_each(
            lambda model: open_tuned_engine(targets[model.ref]), generative=False
        )
        self._engines = {ref: engine for ref, (engine, _) in opened.items()}
        self._vocabularies = {
            ref: TokenVocabulary(self._registered[ref].directory)
            for ref in opened
            if any(TASKS[task].needs_vocabulary for task in self._registered[ref].tasks)
        }
        self._output_values = Capacity(lambda: MAX_OUTPUT_VALUES, "values of large outputs")
        self._lone_passes = LonePassPlanner(
            {ref: targets[ref] for ref in opened if device is Device.CPU},
            threads=max(usable_cores(), settings.intra_op_threads),
            max_bytes=settings.lone_pass_bytes,
        )
        self._scheduler = BatchScheduler(
            self._engines,
            BatchSettings(),
            concurrent_passes=settings.concurrent_passes,
            recorder=recorder,
            plan_lone_pass=self._lone_passes.plan,
            estimate_item=TablePrices(
                {ref: targets[ref] for ref in opened}, lambda: self._scheduler.settings
            ).estimate_s,
        )
        untuned = {ref: targets[ref] for ref, (_, is_tuned) in opened.items() if not is_tuned}
        self._tuner = BackgroundTuner(
            untuned if settings.tune == "background" else {}, self._swap_engine
        )

    def start(self) -> None:
        """Start tuning the models without measurements for this host, in the background."""
        self._tuner.start()

    def configure(self, settings: BatchSettings) -> None:
        """Apply `settings` from the next pass on."""
        self._scheduler.settings = settings

    async def infer(self, batch: TokenizedBatch) -> list[Outcome]:
        """Return one outcome per call, in order. Cancelling drops the items still in the queue."""
        outcomes: dict[int, Outcome] = {}
        async with aclosing(self.stream(batch)) as parts:
            async for part in parts:
                outcomes |= part
        return [outcomes[index] for index in range(len(batch.calls))]

    async def stream(self, batch: TokenizedBatch) -> AsyncGenerator[dict[int, Outcome], None]:
        """Yield the outcome of each call by its index: those that one pass completes together.

        Closing drops the items still in the queue.
        """
        items = iter(batch.items())
        submitted = [self._submit(batch.key, call, items) for call in batch.calls]
        done = _DoneCalls(submitted)
        answered = 0
        try:
            while answered < len(submitted):
                indices = await done.take()
                yield {index: await self._finish(batch, submitted[index]) for index in indices}
                answered += len(indices)
        finally:
            for call in submitted:
                if isinstance(call, _Submitted):
                    if call.outputs.cancel():
                        self._scheduler.clean()
                    self._output_values.release(call.large_values)

    def _submit(
        self, key: BatchKey, call: TokenizedCall | ServeError, items: Iterator[TokenizedItem]
    ) -> _Submitted | ServeError:
        if isinstance(call, ServeError):
            return call
        model, unpooled = key.model, TASKS[key.task].unpooled
        call_items = list(islice(items, len(call.lengths)))
        if model not in self._engines:
            return load_error(model, self._failed)
        try:
            values = _count_large_values(
                call_items, self._registered[model].manifest, unpooled=unpooled
            )
            self._output_values.reserve(values)
        except ServeError as error:
            return error
        try:
            outputs = self._scheduler.submit(
                model,
                call_items,
                call.deadline_s,
                unpooled=unpooled,
                client=call.client,
                priority=call.priority,
            )
        except ServeError as error:
            self._output_values.release(values)
            return error
        return _Submitted(call, call_items, outputs, values)

    async def _finish(self, batch: TokenizedBatch, submitted: _Submitted | ServeError) -> Outcome:
        if isinstance(submitted, ServeError):
            return submitted
        call = submitted.call
        try:
            done = await submitted.outputs
        except ServeError as error:
            return error
        model = batch.key.model
        context = DecodeContext(
            rows=done.rows,
            items=submitted.items,
            token_offsets=call.token_offsets,
            manifest=self._registered[model].manifest,
            vocabulary=self._vocabularies.get(model),
        )
        try:
            decode = partial(TASKS[batch.key.task].decode, context, call.options)
            is_long = sum(row.size for row in done.rows) > INLINE_VALUES
            value = await asyncio.to_thread(decode) if is_long else decode()
        except ServeError as error:
            return error
        except Exception as error:
            log.error("bug: task %s failed to decode", batch.key.task, exc_info=error)
            return hide_details(error)
        return CallResult(
            value=value,
            compute_type=done.compute_type,
            truncated=call.truncated,
            timings=done.timings._replace(tokenize_s=batch.tokenize_s),
        )

    def load(self, backlog: int = 0) -> Load:
        """Return the load of a replica for which `backlog` tokens wait elsewhere. See LoadMeter."""
        return self._scheduler.load(backlog)

    async def check_health(self) -> None:
        """Raise EngineFailed if Ray Serve must replace this replica."""
        check_workers(self._scheduler.health.values(), self._hang_timeout_s)

    async def close(self) -> None:
        """Finish accepted calls, then release the engines."""
        await asyncio.to_thread(self._tuner.close)
        await self._scheduler.drain()
        self._lone_passes.close()
        for engine in self._engines.values():
            engine.close()

    def _swap_engine(self, model: ModelRef, engine: EncoderEngine) -> None:
        # Running passes hold the previous engine; the last of them releases it.
        self._engines[model] = engine


def _count_large_values(
    items: Sequence[TokenizedItem], manifest: ArtifactManifest, *, unpooled: bool
) -> int:
    """Count the values of token vectors or mask scores; other outputs are small.

    Raises InputTooLong for more tokens or masks than one response can hold.
    """
    if unpooled:
        tokens = sum(len(item.ids) for item in items)
        max_tokens = MAX_TOKEN_VALUES // manifest.output_width
        if tokens > max_tokens:
            raise InputTooLong(
                f"`inputs` has {tokens} tokens; the maximum for token vectors is {max_tokens}. "
                "Send fewer or shorter texts.",
                field="inputs",
            )
        return tokens * manifest.output_width
    if manifest.head is ModelHead.MASKS:
        masks = sum(int((item.ids == manifest.mask_token).sum()) for item in items)
        max_masks = MAX_MASK_VALUES // manifest.output_width
        if masks > max_masks:
            raise InputTooLong(
                f"`inputs` has {masks} mask tokens; the maximum is {max_masks}. Send fewer texts.",
                field="inputs",
            )
        return masks * manifest.output_width
    return 0
