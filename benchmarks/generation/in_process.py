"""A sealed model that generates, in this process: loop and decoder as a replica has them.

Without Ray and HTTP, so this is what they are measured against.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from benchmarks.generation.streams import StreamRequest, StreamResult
from deployments.artifacts.types import TaskName
from deployments.config import GeneratorSettings, SchedulingSettings
from deployments.engines.decoder import DecoderSpec
from deployments.engines.decoder_factory import open_decoder
from deployments.errors import ServeError
from deployments.generation.messages import (
    Chunk,
    GenerationCall,
    GenerationOptions,
    SamplingParams,
    Started,
)
from deployments.generation.preparation import RequestPreparer
from deployments.generation.scheduler import GenerationLoop
from deployments.generation.step_executor import JobEvent
from deployments.messages import ModelRef
from deployments.records import StepRecord
from deployments.registry import RegisteredModel

LONGEST_S = 600.0
GREEDY = SamplingParams(temperature=0.0)


class InProcessGenerator:
    """A TextGenerator over a GenerationLoop. To be made where the event loop `events` is known."""

    def __init__(
        self,
        model: LocalModel,
        *,
        rows: int,
        threads: int,
        events: asyncio.AbstractEventLoop,
        rules: SchedulingSettings | None = None,
    ) -> None:
        manifest = model.manifest
        if manifest.generation_config is None:
            raise BenchmarkError(
                f"`{manifest.id}` writes no text", hint="name a model that does with --model ID"
            )
        settings = GeneratorSettings(
            intra_op_threads=threads,
            kv_slots=rows,
            kv_cache_bytes=1 << 62,  # every row that is asked for
        )
        spec = DecoderSpec.of(model.directory, manifest, model.candidate)
        self._decoder = open_decoder(spec, settings)
        self._ref = ModelRef(manifest.id, manifest.version)
        opened = RegisteredModel(
            self._ref, manifest, model.directory, 0.0, (TaskName.TEXT_GENERATION,)
        )
        self._preparation = RequestPreparer(opened, self._decoder.info)
        self._events = events
        self._readers: dict[int, _TokenRecorder] = {}
        self._loop = GenerationLoop(
            self._decoder,
            rules or SchedulingSettings(),
            self._publish,
            _NoRecords(),
            manifest.id,
        )
        self._loop.start()

    @property
    def context(self) -> int:
        """Tokens of prompt and answer that a row has room for."""
        return self._decoder.info.context

    @property
    def load(self) -> tuple[int, int]:
        """Requests that are being answered, and requests that wait."""
        return self._loop.load

    async def answer(self, ask: StreamRequest) -> StreamResult:
        """One stream, to its end or until its reader leaves. Raises ServeError."""
        options = GenerationOptions(
            sampling=GREEDY, max_new_tokens=ask.new_tokens, min_new_tokens=ask.new_tokens
        )
        call = GenerationCall(self._ref, ask.prompt, options, time.time() + LONGEST_S)
        submitted_s = time.perf_counter()
        job = self._preparation.build_job(call, None)
        reader = self._readers[job.number] = _TokenRecorder(ask, self._events)
        try:
            self._loop.submit(job)
            await reader.done
        finally:
            del self._readers[job.number]
            self._loop.cancel(job)
        return reader.answer(submitted_s)

    def close(self) -> None:
        """Finish what runs, then give the memory back."""
        self._loop.close()
        self._decoder.close()

    def _publish(self, events: Sequence[JobEvent]) -> None:
        """Called from the loop's thread: the time of a token is when it is published."""
        self._events.call_soon_threadsafe(self._hand_out, time.perf_counter(), events)

    def _hand_out(self, now_s: float, events: Sequence[JobEvent]) -> None:
        for event in events:
            reader = self._readers.get(event.job)
            if reader is not None:  # else it left meanwhile
                reader.put(now_s, event.payload)


class _TokenRecorder:
    """Notes what comes of one job. `done` when it has ended, or the reader has had enough."""

    def __init__(self, ask: StreamRequest, events: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = events.create_future()
        self._ask = ask
        self._started: Started | None = None
        self._chunks: list[Chunk] = []
        self._arrivals_s: list[float] = []
        if ask.disconnect_after == 0:
            self.done.set_result(None)

    def put(self, now_s: float, what: Started | Chunk | ServeError) -> None:
        """Take the next news."""
        if self.done.done():
            return
        if isinstance(what, ServeError):
            self.done.set_exception(what)
        elif isinstance(what, Started):
            self._started = what
        else:
            self._chunks.append(what)
            self._arrivals_s += [now_s] * len(what.tokens)
            if self._ask.begun is not None:
                self._ask.begun.set()
            if what.finished is not None or len(self._arrivals_s) == self._ask.disconnect_after:
                self.done.set_result(None)

    def answer(self, submitted_s: float) -> StreamResult:
        """All that came."""
        return StreamResult(
            submitted_s=submitted_s,
            arrivals_s=tuple(self._arrivals_s),
            tokens=len(self._arrivals_s),
            ids=tuple(token.id for chunk in self._chunks for token in chunk.tokens),
            text="".join(chunk.text for chunk in self._chunks),
            cached_tokens=self._started.cached_tokens if self._started else 0,
        )


class _NoRecords:
    """A StepRecorder that publishes nothing."""

    def record(self, done: StepRecord) -> None:
        """Let it pass."""
