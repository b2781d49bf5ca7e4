"""Generator replica: a decoder for each loaded model, and the scheduler that runs it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import NamedTuple, TypeVar

from deployments.artifacts.manifest import Candidate
from deployments.artifacts.types import Device
from deployments.capacity import Capacity
from deployments.config import AppArgs, SchedulingSettings
from deployments.engines.cuda_errors import check_context
from deployments.engines.decoder import DecoderEngine, DecoderSpec
from deployments.engines.decoder_factory import (
    close_on_error,
    measure_kv_cache,
    open_decoder,
    select_candidate,
)
from deployments.errors import HardwareUnavailable, ServeError
from deployments.generation.grammar import Constraint, GrammarTooCostly
from deployments.generation.grammar_trials import FULL, QUICK, TrialLimits
from deployments.generation.job import Job
from deployments.generation.preparation import RequestPreparer
from deployments.generation.scheduler import GenerationScheduler
from deployments.generation.step_results import JobEvent
from deployments.health import ModelHealths, WorkerHealth, check_workers
from deployments.load import Load
from deployments.messages import (
    Chunk,
    Completion,
    GenerationCall,
    ModelRef,
    Started,
    count_prompt,
    merge_chunks,
)
from deployments.records import StepRecorder
from deployments.registry import RegisteredModel
from deployments.replicas.device_memory import open_device_memory
from deployments.replicas.fair_threads import FairThreads
from deployments.replicas.model_pool import ModelLoader, ModelPool
from deployments.replicas.pinned_models import PinnedModels
from deployments.replicas.pool_memory import leave_room_for_arena

log = logging.getLogger("ray.serve.hundredfold")

T = TypeVar("T")

# Limit of the compiled grammars of all requests, in bytes. Most grammars take less than 1 MB.
MAX_GRAMMAR_BYTES = 512 << 20
QUICK_GRAMMAR_THREADS = 2


class StreamBuffer:
    """Buffer of one job's events for one reader. It merges unread chunks."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._chunks: list[Chunk] = []
        self._error: ServeError | None = None
        self._has_events = asyncio.Event()

    def put(self, event: Started | Chunk | ServeError) -> None:
        """Add an event. Call it on the event loop."""
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, ServeError):
            self._error = event
        else:
            self._chunks.append(event)
        self._has_events.set()

    async def take(self) -> Started | Chunk:
        """Await the next event. Raises the job's ServeError after all chunks."""
        await self._has_events.wait()
        if self._started is not None:
            started, self._started = self._started, None
            self._clear_if_empty()
            return started
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            self._clear_if_empty()
            return merge_chunks(chunks)
        if self._error is None:
            raise AssertionError("bug: the buffer signals events and is empty")
        raise self._error

    def _clear_if_empty(self) -> None:
        if not self._chunks and self._error is None:
            self._has_events.clear()


class GeneratorReplica:
    """Replica that answers generation calls on one kind of device.

    Create it inside a running event loop.
    """

    def __init__(self, args: AppArgs, device: Device, recorder: StepRecorder) -> None:
        self._hardware = args.generators[device].resolve()
        self._hang_timeout_s = args.hang_timeout_s
        self._device = device
        self._recorder = recorder
        self._settings = SchedulingSettings()
        self._event_loop = asyncio.get_running_loop()
        self._readers: dict[int, StreamBuffer] = {}  # by job number
        # Prompts use one thread, because chat templates are not thread-safe. Grammars have other
        # threads, so that prompts do not wait for them. Slow grammars have their own thread.
        self._prompts = FairThreads("prompts")
        self._quick_grammars = FairThreads("grammars", QUICK_GRAMMAR_THREADS)
        self._long_grammars = FairThreads("long-grammars")
        self._health = ModelHealths()
        self._prompt_health = WorkerHealth("the prompt thread")
        self._grammar_health = WorkerHealth("a grammar thread")
        self._preparing = 0  # calls that wait for a model, their grammar or the prompt thread
        self._grammar_bytes = Capacity(lambda: MAX_GRAMMAR_BYTES, "bytes of compiled grammars")
        self._has_started = False
        self._pinned = PinnedModels(args, self._serves)
        self.pool = ModelPool(
            args.store_path(),
            ModelLoader(
                self._measure,
                self._load,
                self._close,
                f"`kv_cache_bytes`, `kv_slots` or `max_context_tokens` of `generators.{device}`",
            ),
            leave_room_for_arena(self._hardware.pool_bytes, device, concurrent_passes=1),
            self._pinned.refs,
            device_memory=open_device_memory(args.gpu_memory, device),
        )
        self._pinned.load_into(self.pool)

    def start(self) -> None:
        """Start the schedulers of the loaded models, and load newly pinned models from now on.

        `_load` starts the schedulers of later models.
        """
        self._has_started = True
        for model in self.pool.models():
            model.scheduler.start()
        self._pinned.start(self.pool)

    def configure(self, settings: SchedulingSettings) -> None:
        """Apply `settings` from the next step on."""
        self._settings = settings

    async def complete(self, call: GenerationCall) -> Completion | ServeError:
        """Generate the whole answer, or return an error. Cancelling releases the KV slot."""
        started: Started | None = None
        chunks: list[Chunk] = []
        async for event in self.stream(call):
            if isinstance(event, ServeError):
                return event
            if isinstance(event, Started):
                started = event
            else:
                chunks.append(event)
        answer = merge_chunks(chunks)
        if started is None or answer.finished is None:
            raise AssertionError("bug: a stream ended without its first or last event")
        return Completion(started, answer.text, answer.tokens, answer.finished)

    async def stream(
        self, call: GenerationCall
    ) -> AsyncGenerator[Started | Chunk | ServeError, None]:
        """Yield one Started, then chunks up to the one with `finished` set.

        An error ends the stream early: the last event is then a ServeError, which is not raised.
        Closing the stream releases the KV slot.
        """
        try:
            async with self._run_job(call) as buffer:
                while True:
                    event = await buffer.take()
                    yield event
                    if isinstance(event, Chunk) and event.finished is not None:
                        return
        except ServeError as error:
            yield error

    async def tokenize_prompt(self, call: GenerationCall) -> tuple[int, ...] | ServeError:
        """Return the token ids of a call's prompt."""
        try:
            async with self.pool.lease(call.model, calls=1) as model:
                return await self._run_prompt(
                    call, partial(model.preparer.tokenize_prompt, call.prompt)
                )
        except ServeError as error:
            return error

    @asynccontextmanager
    async def _run_job(self, call: GenerationCall) -> AsyncIterator[StreamBuffer]:
        async with AsyncExitStack() as held:
            self._preparing += 1
            try:
                model, job = await self._prepare_job(call, held)
            finally:
                self._preparing -= 1
            buffer = StreamBuffer()
            self._readers[job.number] = buffer
            try:
                model.scheduler.submit(job)
                yield buffer
            finally:
                del self._readers[job.number]
                model.scheduler.cancel(job)

    async def _prepare_job(
        self, call: GenerationCall, held: AsyncExitStack
    ) -> tuple[_LoadedGenerator, Job]:
        """Return the call's model and job. `held` later releases the model and grammar bytes."""
        model = await held.enter_async_context(self.pool.lease(call.model, calls=1))
        model.scheduler.check(model.preparer.estimate(call))
        constraint = await self._compile_grammar(model.preparer, call)
        grammar_bytes = constraint.memory_bytes if constraint else 0
        held.enter_context(self._grammar_bytes.hold(grammar_bytes, call.client))
        received_s = time.perf_counter()
        job = await self._run_prompt(call, partial(model.preparer.build_job, call, constraint))
        job.times.tokenize_s = time.perf_counter() - received_s
        return model, job

    async def _run_prompt(self, call: GenerationCall, work: Callable[[], T]) -> T:
        """Run `work`, which tokenizes the call's prompt, on the prompt thread."""
        return await self._prompts.run(
            self._prompt_health.wrap(work),
            cost=1 + count_prompt(call.prompt),
            client=call.client,
            priority=call.priority,
        )

    async def _compile_grammar(
        self, preparer: RequestPreparer, call: GenerationCall
    ) -> Constraint | None:
        """Compile the grammar of a call, if it has one.

        Waiting clients take turns, one grammar at a time. A grammar that exceeds the limits of the
        quick threads is compiled again on the thread for long grammars.
        """
        grammar = call.options.grammar
        if grammar is None:
            return None
        with_health = self._grammar_health.wrap(preparer.compile_grammar)

        async def run(threads: FairThreads, limits: TrialLimits) -> Constraint:
            work = partial(with_health, grammar, limits)
            return await threads.run(work, cost=1, client=call.client, priority=call.priority)

        try:
            return await run(self._quick_grammars, QUICK)
        except GrammarTooCostly:
            return await run(self._long_grammars, FULL)

    def measure_load(self, _backlog: int = 0) -> Load:
        """Return the share of KV slots in use, and the predicted time of the waiting requests.

        All models share the device, so their shares add up: two half-used models make the replica
        busy. A call that has no job yet also counts as a used slot, because autoscaling can add a
        replica for it. The backlog is ignored, because all requests wait in this replica.
        """
        busy, queued_s = self._preparing / self._hardware.kv_slots, 0.0
        for model in self.pool.models():
            busy += model.scheduler.slot_use.used / model.decoder.info.slots
            queued_s += model.scheduler.queued_s
        return Load(min(busy, 1.0), queued_s)

    async def check_health(self) -> None:
        """Raise EngineFailed if Ray Serve must replace this replica."""
        check_context()
        for model in self.pool.models():
            model.scheduler.check_thread()
        workers = (*self._health.values(), self._prompt_health, self._grammar_health)
        check_workers(workers, self._hang_timeout_s)

    async def close(self) -> None:
        """Finish queued and active jobs, then release the engines.

        Calls that have no job yet get Overloaded.
        """
        self._pinned.close()
        for threads in (self._prompts, self._quick_grammars, self._long_grammars):
            await threads.close()
        for model in self.pool.models():
            await asyncio.to_thread(model.scheduler.close)
        await self.pool.close()

    def _serves(self, model: RegisteredModel) -> bool:
        return model.is_generative and model.manifest.candidate_for(self._device) is not None

    def _measure(self, model: RegisteredModel) -> int:
        candidate = self._select_candidate(model)
        spec = DecoderSpec.of(model.directory, model.manifest, candidate)
        return model.manifest.count_bytes(candidate) + measure_kv_cache(spec, self._hardware)

    def _select_candidate(self, model: RegisteredModel) -> Candidate:
        candidate = select_candidate(model.manifest, self._device, self._hardware)
        if candidate is None:
            raise HardwareUnavailable(
                f"model {model.ref.id} has no candidate for `{self._device}`; build it for that "
                "device"
            )
        return candidate

    def _load(self, model: RegisteredModel) -> _LoadedGenerator:
        """Open and warm up the decoder of a model. Blocks.

        Start the model's scheduler if the replica has started.
        """
        model.manifest.verify(model.directory)
        spec = DecoderSpec.of(model.directory, model.manifest, self._select_candidate(model))
        decoder = open_decoder(spec, self._hardware)
        info = decoder.info
        log.info(
            "model %s loaded: %s, kv_slots=%d (configured %d), context=%d tokens",
            *(model.ref.id, info.compute_type, info.slots, self._hardware.kv_slots, info.context),
        )
        with close_on_error(decoder):
            preparer = RequestPreparer(model, info)
        scheduler = GenerationScheduler(
            decoder,
            lambda: self._settings,
            self._publish,
            self._recorder,
            self._health[model.ref],
        )
        if self._has_started:
            scheduler.start()
        return _LoadedGenerator(decoder, scheduler, preparer)

    def _close(self, ref: ModelRef, model: _LoadedGenerator) -> None:
        """End the scheduler of a model that no call uses, and release its memory. Blocks."""
        model.scheduler.close()
        self._health.forget(ref)
        model.decoder.close()
        model.preparer.close()

    def _publish(self, events: Sequence[JobEvent]) -> None:
        """Pass events from the thread of a GenerationScheduler to the asyncio event loop."""
        self._event_loop.call_soon_threadsafe(self._route_events, events)

    def _route_events(self, events: Sequence[JobEvent]) -> None:
        for event in events:
            reader = self._readers.get(event.job)
            if reader is not None:  # None: the client disconnected
                reader.put(event.payload)


class _LoadedGenerator(NamedTuple):
    decoder: DecoderEngine
    scheduler: GenerationScheduler
    preparer: RequestPreparer
