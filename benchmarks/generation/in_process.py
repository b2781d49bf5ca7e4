"""Generation in this process by a replica's scheduler and decoder, without Ray and HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from benchmarks.generation.streams import StreamRequest, StreamResult
from deployments.artifacts.types import TaskName
from deployments.config import GeneratorSettings, SchedulingSettings
from deployments.deadlines import deadline_after
from deployments.engines.decoder import DecoderSpec
from deployments.engines.decoder_factory import open_decoder
from deployments.errors import ServeError
from deployments.generation.preparation import RequestPreparer
from deployments.generation.scheduler import GenerationScheduler
from deployments.generation.step_results import JobEvent
from deployments.health import WorkerHealth
from deployments.messages import (
    Chunk,
    GenerationCall,
    GenerationOptions,
    ModelRef,
    SamplingParams,
    Started,
)
from deployments.records import StepRecord
from deployments.registry import RegisteredModel

REQUEST_TIMEOUT_S = 600.0
GREEDY = SamplingParams(temperature=0.0)


class InProcessGenerator:
    """Implementation of `TextGenerator` (streams.py) that runs a generation scheduler.

    `events` is the event loop that runs `generate`.
    """

    def __init__(
        self,
        model: LocalModel,
        *,
        kv_slots: int,
        threads: int,
        events: asyncio.AbstractEventLoop,
        scheduling: SchedulingSettings | None = None,
    ) -> None:
        manifest = model.manifest
        if manifest.generation_config is None:
            raise BenchmarkError(
                f"`{manifest.id}` does not generate text",
                hint="name a model for text generation with --model ID",
            )
        settings = GeneratorSettings(
            intra_op_threads=threads,
            kv_slots=kv_slots,
            kv_cache_bytes=1 << 62,  # no limit, so that all KV slots are allocated
        )
        spec = DecoderSpec.of(model.directory, manifest, model.candidate)
        self._decoder = open_decoder(spec, settings)
        self._ref = ModelRef(manifest.id, manifest.version)
        opened = RegisteredModel(
            self._ref, manifest, model.directory, 0, (TaskName.TEXT_GENERATION,)
        )
        self._preparation = RequestPreparer(opened, self._decoder.info)
        self._events = events
        self._recorders: dict[int, _TokenRecorder] = {}
        step_settings = scheduling or SchedulingSettings()
        self._scheduler = GenerationScheduler(
            self._decoder,
            lambda: step_settings,
            self._publish,
            _NoRecords(),
            WorkerHealth(manifest.id),
        )
        self._scheduler.start()

    @property
    def context(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""
        return self._decoder.info.context

    @property
    def slot_use(self) -> tuple[int, int]:
        """Number of running requests, and number of waiting requests."""
        return self._scheduler.slot_use

    async def generate(self, request: StreamRequest) -> StreamResult:
        """Run one stream to its end or to the disconnect. Raises ServeError if it fails."""
        options = GenerationOptions(
            sampling=GREEDY,
            max_new_tokens=request.new_tokens,
            min_new_tokens=0 if request.may_end_early else request.new_tokens,
            prefix_cache_scope=request.prefix_cache_scope,
        )
        call = GenerationCall(self._ref, request.prompt, options, deadline_after(REQUEST_TIMEOUT_S))
        submitted_s = time.perf_counter()
        job = self._preparation.build_job(call, None)
        recorder = self._recorders[job.number] = _TokenRecorder(request, self._events)
        try:
            self._scheduler.submit(job)
            await recorder.done
        finally:
            del self._recorders[job.number]
            self._scheduler.cancel(job)
        return recorder.answer(submitted_s)

    def close(self) -> None:
        self._scheduler.close()
        self._decoder.close()

    def _publish(self, events: Sequence[JobEvent]) -> None:
        """Pass events from the scheduler thread to the event loop.

        The time of this call counts as the arrival time of the tokens.
        """
        self._events.call_soon_threadsafe(self._deliver, time.perf_counter(), events)

    def _deliver(self, now_s: float, events: Sequence[JobEvent]) -> None:
        for event in events:
            recorder = self._recorders.get(event.job)
            if recorder is not None:  # None if the stream has ended or was disconnected
                recorder.put(now_s, event.payload)


class _TokenRecorder:
    """Tokens of one job with arrival times. `done` is set at the end or at the disconnect."""

    def __init__(self, request: StreamRequest, events: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = events.create_future()
        self._ask = request
        self._started: Started | None = None
        self._chunks: list[Chunk] = []
        self._arrivals_s: list[float] = []
        if request.disconnect_after == 0:
            self.done.set_result(None)

    def put(self, now_s: float, what: Started | Chunk | ServeError) -> None:
        if self.done.done():
            return
        if isinstance(what, ServeError):
            self.done.set_exception(what)
        elif isinstance(what, Started):
            self._started = what
        else:
            self._chunks.append(what)
            self._arrivals_s += [now_s] * len(what.tokens)
            if self._ask.first_token is not None:
                self._ask.first_token.set()
            if what.finished is not None or len(self._arrivals_s) == self._ask.disconnect_after:
                self.done.set_result(None)

    def answer(self, submitted_s: float) -> StreamResult:
        return StreamResult(
            submitted_s=submitted_s,
            arrivals_s=tuple(self._arrivals_s),
            tokens=len(self._arrivals_s),
            ids=tuple(token.id for chunk in self._chunks for token in chunk.tokens),
            text="".join(chunk.text for chunk in self._chunks),
            cached_tokens=self._started.cached_tokens if self._started else 0,
        )


class _NoRecords:
    """StepRecorder that discards all records."""

    def record(self, done: StepRecord) -> None:
        pass
