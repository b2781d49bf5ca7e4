"""An encoder: the batch loop over every model's graph for one kind of device."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device, ModelHead
from deployments.batching.scheduler import BatchScheduler, CallOutputs
from deployments.config import AppArgs, BatchSettings
from deployments.engines import EncoderEngine, check_providers
from deployments.engines.base import MAX_CONSECUTIVE_FAILURES
from deployments.errors import EngineFailed, InputTooLong, ServeError
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
from deployments.tuning.opening import open_tuned_engine

log = logging.getLogger("ray.serve.hundredfold")

# An item that waits longer than this while the replica claims health: the engine hangs.
HANG_TIMEOUT_S = 60.0
# Numbers that are decoded on the event loop, in a few milliseconds; more take a thread.
INLINE_VALUES = 1 << 18
# Of the vectors of all tokens of one call: 16 MB, and three times that as JSON.
MOST_TOKEN_VALUES = 1 << 22
# Of the scores of the whole vocabulary for all masks of one call, which are kept until its last
# pass is done: 512 MB. Masks are short to write, and a body of nothing else would ask for 40 GB.
MOST_MASK_VALUES = 1 << 27


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A call whose items wait or run."""

    call: TokenizedCall
    items: Sequence[TokenizedItem]
    rows: asyncio.Future[CallOutputs]


class EncoderReplica:
    """Runs encoded batches; deployed once per device."""

    def __init__(self, args: AppArgs, device: Device, recorder: ForwardPassRecorder) -> None:
        encoder = args.encoders[device]
        self._device = device
        check_providers(encoder)
        registry = ModelRegistry.of(args)
        self._models = {model.ref: model for model in registry.open_models()}
        places = {
            ref: TuningTarget(model.directory, model.manifest, device, encoder)
            for ref, model in self._models.items()
        }
        opened, self._failed = registry.load_each(
            lambda model: open_tuned_engine(places[model.ref]), generative=False
        )
        self._engines = {ref: engine for ref, (engine, _) in opened.items()}
        self._vocabularies = {
            ref: TokenVocabulary(self._models[ref].directory)
            for ref in opened
            if any(TASKS[task].needs_vocabulary for task in self._models[ref].tasks)
        }
        self._loop = BatchScheduler(
            self._engines, BatchSettings(), runs=encoder.concurrent_passes, recorder=recorder
        )
        untuned = {ref: places[ref] for ref, (_, is_tuned) in opened.items() if not is_tuned}
        self._tuning = BackgroundTuner(untuned if encoder.tune == "background" else {}, self._adopt)

    def start(self) -> None:
        """Tune, in the background, what nobody tuned for this host."""
        self._tuning.start()

    def configure(self, rules: BatchSettings) -> None:
        """Use other batching rules from the next pass on."""
        self._loop.rules = rules

    async def infer(self, batch: TokenizedBatch) -> list[Outcome]:
        """One outcome per call, in order; a cancelled batch is dropped before the engine."""
        items = iter(batch.items())
        pending = [self._submit(batch.key, call, items) for call in batch.calls]
        try:
            return [
                work if isinstance(work, ServeError) else await self._outcome(batch, work)
                for work in pending
            ]
        finally:
            for work in pending:
                if isinstance(work, _Submitted):
                    work.rows.cancel()

    def _submit(
        self, key: BatchKey, call: TokenizedCall | ServeError, items: Iterator[TokenizedItem]
    ) -> _Submitted | ServeError:
        if isinstance(call, ServeError):
            return call
        model, unpooled = key.model, TASKS[key.task].unpooled
        own = list(islice(items, len(call.lengths)))
        if model not in self._engines:
            return load_error(model, self._failed)
        try:
            _check_answerable(own, self._models[model].manifest, unpooled=unpooled)
            rows = self._loop.submit(model, own, call.deadline_s, unpooled=unpooled)
        except ServeError as error:
            return error
        return _Submitted(call, own, rows)

    async def _outcome(self, batch: TokenizedBatch, work: _Submitted) -> Outcome:
        call = work.call
        try:
            done = await work.rows
        except ServeError as error:
            return error
        model = batch.key.model
        computed = DecodeContext(
            rows=done.rows,
            items=work.items,
            token_offsets=call.token_offsets,
            manifest=self._models[model].manifest,
            vocabulary=self._vocabularies.get(model),
        )
        try:
            decode = partial(TASKS[batch.key.task].decode, computed, call.options)
            is_long = sum(row.size for row in done.rows) > INLINE_VALUES
            value = await asyncio.to_thread(decode) if is_long else decode()
        except ServeError as error:
            return error
        except Exception as error:
            log.error("decoding failed, this is a bug", exc_info=error)
            return EngineFailed(f"the answer could not be decoded: {error!r}")
        return CallResult(
            value=value,
            compute_type=done.compute_type,
            truncated=call.truncated,
            timings=done.timings._replace(tokenize_s=batch.tokenize_s),
        )

    async def check_health(self) -> None:
        """Raise when the engine no longer takes work."""
        age_s = self._loop.oldest_age_s()
        if age_s > HANG_TIMEOUT_S:
            raise EngineFailed(f"{self._device} encoder: an item has waited {age_s:.0f} s")
        failures = self._loop.failures()
        if failures >= MAX_CONSECUTIVE_FAILURES:
            raise EngineFailed(f"{self._device} encoder: the last {failures} passes failed")

    async def close(self) -> None:
        """Finish what was accepted, then give the memory back."""
        await asyncio.to_thread(self._tuning.close)
        await self._loop.drain()
        for engine in self._engines.values():
            engine.close()

    def _adopt(self, model: ModelRef, engine: EncoderEngine) -> None:
        # The former engine is not closed: passes under way hold it, and the last one lets it go.
        self._engines[model] = engine


def _check_answerable(
    items: Sequence[TokenizedItem], manifest: ArtifactManifest, *, unpooled: bool
) -> None:
    """Raise InputTooLong for a call with more tokens, or masks, than one answer has room for."""
    if unpooled:
        tokens, most = (
            sum(len(item.ids) for item in items),
            MOST_TOKEN_VALUES // manifest.output_width,
        )
        if tokens > most:
            raise InputTooLong(
                f"`inputs` has {tokens} tokens in all, at most {most} get a vector each in one "
                "answer",
                field="inputs",
            )
    elif manifest.head is ModelHead.MASKS:
        masks = sum(int((item.ids == manifest.mask_token).sum()) for item in items)
        most = MOST_MASK_VALUES // manifest.output_width
        if masks > most:
            raise InputTooLong(
                f"`inputs` has {masks} masks in all, at most {most} are filled in one answer",
                field="inputs",
            )
