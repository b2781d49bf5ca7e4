"""A generator: for every model that generates, a decoder and the loop that keeps it busy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import NamedTuple

from deployments.artifacts.types import Device
from deployments.config import AppArgs, SchedulingSettings
from deployments.engines.decoder import DecoderEngine, DecoderSpec
from deployments.engines.decoder_factory import close_on_error, open_decoder, select_candidate
from deployments.errors import DeadlineExceeded, EngineFailed, HardwareUnavailable, ServeError
from deployments.generation.job import Job
from deployments.generation.messages import (
    Chunk,
    Completion,
    GenerationCall,
    Started,
    merge_chunks,
)
from deployments.generation.preparation import RequestPreparer
from deployments.generation.scheduler import GenerationLoop
from deployments.generation.step_executor import JobEvent
from deployments.records import StepRecorder
from deployments.registry import ModelRegistry, RegisteredModel, load_error


class StreamBuffer:
    """The news of one job, for one reader; chunks that nobody has taken yet become one.

    A reader that is more than `most_tokens` behind makes it full; it is the caller's to act.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._started: Started | None = None
        self._chunks: list[Chunk] = []
        self._error: ServeError | None = None
        self._news = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether the reader is too far behind."""
        return sum(len(chunk.tokens) for chunk in self._chunks) > self._most_tokens

    def put(self, what: Started | Chunk | ServeError) -> None:
        """Add news; called on the event loop."""
        if isinstance(what, Started):
            self._started = what
        elif isinstance(what, ServeError):
            self._error = what
        else:
            self._chunks.append(what)
        self._news.set()

    async def take(self) -> Started | Chunk:
        """The next news, once there is some. Raises the job's ServeError, after all chunks."""
        await self._news.wait()
        if self._started is not None:
            started, self._started = self._started, None
            self._rest()
            return started
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            self._rest()
            return merge_chunks(chunks)
        if self._error is None:
            raise AssertionError("this is a bug: a mailbox with news, and nothing in it")
        raise self._error

    def _rest(self) -> None:
        if not self._chunks and self._error is None:
            self._news.clear()


log = logging.getLogger("ray.serve.hundredfold")

# A step that takes longer hangs: parts of prompts take a tenth of a second.
HANG_TIMEOUT_S = 60.0


class GeneratorReplica:
    """Answers calls; deployed once per device. To be made where an event loop runs."""

    def __init__(self, args: AppArgs, device: Device, recorder: StepRecorder) -> None:
        self._hardware = args.generators[device]
        self._device = device
        self._recorder = recorder
        self._rules = SchedulingSettings()
        self._events = asyncio.get_running_loop()
        self._readers: dict[int, _Reader] = {}  # by the number of their jobs
        # One thread each: chat templates are not made for several, and nobody who sends a plain
        # prompt waits for a grammar of somebody else's.
        self._desk = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._served, self._failed = ModelRegistry.of(args).load_each(self._open, generative=True)

    def start(self) -> None:
        """Begin to answer."""
        for served in self._served.values():
            served.loop.start()

    def configure(self, rules: SchedulingSettings) -> None:
        """Use other rules from the next step on."""
        self._rules = rules
        for served in self._served.values():
            served.loop.settings = rules

    async def complete(self, call: GenerationCall) -> Completion | ServeError:
        """The whole answer; a cancelled call frees its row."""
        started: Started | None = None
        chunks: list[Chunk] = []
        async for news in self.stream(call):
            if isinstance(news, ServeError):
                return news
            if isinstance(news, Started):
                started = news
            else:
                chunks.append(news)
        whole = merge_chunks(chunks)
        if started is None or whole.finished is None:
            raise AssertionError("this is a bug: an answer without a beginning or an end")
        return Completion(started, whole.text, whole.tokens, whole.finished)

    async def stream(
        self, call: GenerationCall
    ) -> AsyncGenerator[Started | Chunk | ServeError, None]:
        """One Started, then chunks until one is finished; or, at any time, an error as the last.

        Closing it frees the row.
        """
        try:
            async with self._answering(call) as mailbox:
                while True:
                    news = await mailbox.take()
                    yield news
                    if isinstance(news, Chunk) and news.finished is not None:
                        return
        except ServeError as error:
            yield error

    @asynccontextmanager
    async def _answering(self, call: GenerationCall) -> AsyncIterator[StreamBuffer]:
        served = self._served.get(call.model)
        if served is None:
            raise load_error(call.model, self._failed)
        job = await self._prepared(served.preparation, call)
        reader = _Reader(job, served.loop, StreamBuffer(self._rules.max_stream_buffer_tokens))
        self._readers[job.number] = reader
        try:
            served.loop.submit(job)
            yield reader.mailbox
        finally:
            del self._readers[job.number]
            served.loop.cancel(job)

    async def _prepared(self, preparation: RequestPreparer, call: GenerationCall) -> Job:
        run, constraint = self._events.run_in_executor, None
        if call.options.grammar is not None:
            constraint = await run(self._grammars, preparation.compile_grammar, call)
        return await run(self._desk, preparation.build_job, call, constraint)

    async def check_health(self) -> None:
        """Raise when a decoder no longer answers."""
        for ref, served in self._served.items():
            if served.loop.lost is not None:
                raise served.loop.lost
            step_elapsed_s = served.loop.step_elapsed_s()
            if step_elapsed_s > HANG_TIMEOUT_S:
                raise EngineFailed(f"{ref.id}: a step has taken {step_elapsed_s:.0f} s")

    async def close(self) -> None:
        """Finish what was accepted, then give the memory back."""
        for served in self._served.values():
            await asyncio.to_thread(served.loop.close)
            served.decoder.close()
        self._desk.shutdown()
        self._grammars.shutdown()

    def _open(self, model: RegisteredModel) -> _Served:
        candidate = select_candidate(model.manifest, self._device, self._hardware)
        if candidate is None:
            raise HardwareUnavailable(
                f"Model {model.ref.id} was built without a graph for `{self._device}`"
            )
        spec = DecoderSpec.of(model.directory, model.manifest, candidate)
        decoder = open_decoder(spec, self._hardware)
        info = decoder.info
        log.info(
            "model %s: %s, %d rows of %d tokens (asked for: %d rows)",
            *(model.ref.id, info.compute_type, info.slots, info.context, self._hardware.kv_slots),
        )
        with close_on_error(decoder):
            preparation = RequestPreparer(model, info)
        loop = GenerationLoop(decoder, self._rules, self._publish, self._recorder, model.ref.id)
        return _Served(decoder, loop, preparation)

    def _publish(self, events: Sequence[JobEvent]) -> None:
        """Called from the threads of the loops."""
        self._events.call_soon_threadsafe(self._hand_out, events)

    def _hand_out(self, events: Sequence[JobEvent]) -> None:
        for event in events:
            reader = self._readers.get(event.job)
            if reader is None:  # it left meanwhile
                continue
            reader.mailbox.put(event.payload)
            if reader.mailbox.is_full:
                reader.loop.cancel(reader.job)
                reader.mailbox.put(DeadlineExceeded("the stream was read too slowly"))


class _Reader(NamedTuple):
    """Who waits for the news of a job."""

    job: Job
    loop: GenerationLoop
    mailbox: StreamBuffer


class _Served(NamedTuple):
    """A model at work."""

    decoder: DecoderEngine
    loop: GenerationLoop
    preparation: RequestPreparer
