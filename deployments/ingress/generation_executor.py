"""Execution of generation requests on the generators, with a deadline and a cold start limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from deployments.artifacts.types import Device
from deployments.config import IngressUserConfig
from deployments.deadlines import deadline_after, enforce_deadline
from deployments.errors import Overloaded
from deployments.ingress.choices import gather_or_cancel, offset_seed
from deployments.ingress.client_identity import current_client
from deployments.ingress.devices.cluster_state import ClusterMonitor
from deployments.ingress.devices.cold_start import limit_cold_start
from deployments.ingress.devices.device_choice import DeviceChoice
from deployments.ingress.devices.device_forecasts import RequestWork
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.refusals import RecentRefusals
from deployments.ingress.requests import GenerationRequest
from deployments.keys.caller import current_caller
from deployments.messages import (
    PRIORITIES,
    Completion,
    GenerationCall,
    GenerationOptions,
    ModelRef,
    estimate_prompt_tokens,
)
from deployments.registry import RegisteredModel
from deployments.transports.base import GeneratorClient

LATE = "the generation exceeded the deadline of the request"
REPEAT_TIMEOUT_S = 120.0  # limit for shadow requests; no client waits for them
TRIAL_PROMPT = "a"  # prompt of the single-token trial of a new version
# Maximum number of calls of one request that are in flight. A request may have more calls than the
# queue of a generator holds (`max_waiting_requests`).
MAX_CALLS_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The calls of one request and the generator that runs them."""

    work: RequestWork
    device: Device
    fallback: Device | None
    calls: tuple[GenerationCall, ...]  # `candidates` calls per prompt, in prompt order
    candidates: int
    prompt_sizes: tuple[int, ...]  # estimated tokens, by prompt
    deadline_s: float  # on the monotonic clock
    waits_for_model: bool  # True: no cold start limit; the calls wait until `deadline_s`

    @property
    def model(self) -> RegisteredModel:
        return self.work.model

    @property
    def client(self) -> str:
        return self.calls[0].client

    def repeat_with(self, model: RegisteredModel, seeds: Sequence[int]) -> GenerationPlan:
        """Return a plan with the same calls for another model version, at the lowest priority.

        Call i gets `seeds[i]`. The calls get a new deadline, REPEAT_TIMEOUT_S from now.
        """
        deadline_s = deadline_after(REPEAT_TIMEOUT_S)
        calls = (
            call._replace(
                model=model.ref,
                options=call.options._replace(sampling=call.options.sampling._replace(seed=seed)),
                deadline_s=deadline_s,
                priority=len(PRIORITIES) - 1,
            )
            for call, seed in zip(self.calls, seeds, strict=True)
        )
        return replace(
            self,
            work=self.work._replace(model=model),
            calls=tuple(calls),
            deadline_s=deadline_s,
            waits_for_model=True,
        )

    def call_field_names(self, number: int) -> Mapping[str, str]:
        """Map field names of call `number` to field names of the request, for error messages."""
        several = len(self.prompt_sizes) > 1
        return {"prompt": f"prompt[{number // self.candidates}]"} if several else {}


class GenerationExecutor:
    """Executor that plans generation requests and sends their calls to the generators."""

    def __init__(self, clients: Mapping[Device, GeneratorClient], monitor: ClusterMonitor) -> None:
        self._clients = clients
        self._monitor = monitor
        self._settings = IngressUserConfig()
        self._refusals = RecentRefusals()
        self._in_flight = 0  # number of calls

    def configure(self, settings: IngressUserConfig) -> None:
        """Apply new settings to later requests."""
        self._settings = settings

    def plan(
        self, request: GenerationRequest, work: RequestWork, choice: DeviceChoice
    ) -> GenerationPlan:
        """Build one call per candidate of each prompt; all share one deadline."""
        model = work.model
        timeout_s = self._settings.generation_timeout_s
        deadline_s = request.request_options.start_deadline(timeout_s)
        client = current_client()
        options = request.options
        if request.candidates > request.choices and options.logprobs is None:
            options = options._replace(logprobs=0)  # `select_best` ranks by token logprobs
        if not self._settings.cache.shared:
            options = options._replace(prefix_cache_scope=current_caller().name)
        return GenerationPlan(
            work=work,
            device=choice.device,
            fallback=choice.fallback,
            calls=tuple(
                GenerationCall(
                    model.ref,
                    prompt,
                    offset_seed(options, candidate),
                    deadline_s,
                    client,
                    request.request_options.priority_index,
                )
                for prompt in request.prompts
                for candidate in range(request.candidates)
            ),
            candidates=request.candidates,
            prompt_sizes=tuple(map(estimate_prompt_tokens, request.prompts)),
            deadline_s=deadline_s,
            waits_for_model=bool(request.request_options.wait_for_model),
        )

    async def load(self, model: ModelRef, device: Device) -> None:
        """Let a replica load a model, and generate one token. Raises ServeError."""
        options = GenerationOptions(max_new_tokens=1)
        deadline_s = deadline_after(self._settings.generation_timeout_s)
        await self._clients[device].complete(
            GenerationCall(model, TRIAL_PROMPT, options, deadline_s, priority=1)
        )

    async def complete(self, plan: GenerationPlan) -> list[Completion]:
        """Run all calls; if one fails, cancel the others. Raises ServeError."""
        places = asyncio.Semaphore(MAX_CALLS_IN_FLIGHT)
        return await gather_or_cancel(
            [self._complete(plan, number, places) for number in range(len(plan.calls))]
        )

    async def stream(
        self, plan: GenerationPlan, on_end: Callable[[GenerationStream, int], None]
    ) -> GenerationStream:
        """Return the stream once every prompt has a started completion. Raises ServeError.

        `on_end` is called once, with the stream and the final HTTP status of the request.
        """
        client = self._clients[plan.device]
        places = asyncio.Semaphore(MAX_CALLS_IN_FLIGHT)
        sources = [client.stream(call) for call in plan.calls]
        stream = GenerationStream(
            plan.model,
            on_end,
            max_buffered_tokens=self._settings.stream_buffer_tokens,
            choices_per_prompt=plan.candidates,
            fallback=plan.fallback,
        )
        await stream.start(sources, lambda number: self._with_timeout(plan, number, places))
        return stream

    async def tokenize_prompt(self, plan: GenerationPlan) -> tuple[int, ...]:
        """Return the token ids of the first call's prompt. Raises ServeError."""
        async with self._within_time(plan):
            return await self._clients[plan.device].tokenize_prompt(plan.calls[0])

    async def _complete(
        self, plan: GenerationPlan, number: int, places: asyncio.Semaphore
    ) -> Completion:
        async with self._with_timeout(plan, number, places):
            return await self._clients[plan.device].complete(plan.calls[number])

    @asynccontextmanager
    async def _with_timeout(
        self, plan: GenerationPlan, number: int, places: asyncio.Semaphore
    ) -> AsyncIterator[None]:
        """Wait for one of `places`, apply time limits to this and the call, rename error fields.

        Raises Overloaded without calling a replica if a replica has just refused a similar call.
        """
        call = plan.calls[number]
        options = call.options
        beams = 1 if options.beam_search is None else options.beam_search.num_beams
        work = (options.min_new_tokens, options.max_new_tokens, beams)
        queue = (plan.device, call.model, call.client, call.priority, work)
        size = plan.prompt_sizes[number // plan.candidates]
        if self._in_flight:  # earlier refusals are outdated if no call is in flight
            self._refusals.check(queue, size, call.deadline_s)
        self._in_flight += 1
        try:
            async with self._within_time(plan), places:
                with rename_error_fields(plan.call_field_names(number)):
                    yield
        except Overloaded as error:
            self._refusals.note(queue, size, error)
            raise
        finally:
            self._in_flight -= 1

    @asynccontextmanager
    async def _within_time(self, plan: GenerationPlan) -> AsyncIterator[None]:
        """Apply the limit of a cold start and the deadline of the request to the block."""
        wait_s = None if plan.waits_for_model else self._settings.cold_start_wait_s
        async with (
            limit_cold_start(self._monitor, plan.model, plan.device, wait_s),
            enforce_deadline(plan.deadline_s, LATE),
        ):
            yield
