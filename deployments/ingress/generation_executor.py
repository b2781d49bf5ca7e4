"""Execution of a generation request on a generator: calls, deadline, cold start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deployments.artifacts.types import Device
from deployments.config import IngressUserConfig
from deployments.deadlines import deadline_after, enforce_deadline
from deployments.ingress.choices import gather_or_cancel, offset_seed
from deployments.ingress.cluster_state import ClusterMonitor, DeviceChoice
from deployments.ingress.cold_start import limit_cold_start
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.http.clients import current_client
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.requests import GenerationRequest
from deployments.keys.caller import current_caller
from deployments.messages import Completion, GenerationCall
from deployments.registry import RegisteredModel
from deployments.transports.base import GeneratorClient


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The calls of one request and the generator that runs them."""

    model: RegisteredModel
    device: Device
    fallback: Device | None
    calls: tuple[GenerationCall, ...]  # `candidates` for each prompt
    candidates: int
    prompts: int
    deadline_s: float  # see deployments.deadlines
    waits_for_model: bool  # until the deadline, whether or not a replica runs

    def call_field_names(self, number: int) -> Mapping[str, str]:
        """Map fields of call `number` to fields of the request, for errors."""
        return {"prompt": f"prompt[{number // self.candidates}]"} if self.prompts > 1 else {}


class GenerationExecutor:
    """Generators by device."""

    def __init__(
        self,
        clients: Mapping[Device, GeneratorClient],
        monitor: ClusterMonitor,
        settings: IngressUserConfig,
    ) -> None:
        self._clients = clients
        self._monitor = monitor
        self._settings = settings

    def configure(self, settings: IngressUserConfig) -> None:
        """Apply other settings to new requests."""
        self._settings = settings

    def plan(
        self, request: GenerationRequest, model: RegisteredModel, choice: DeviceChoice
    ) -> GenerationPlan:
        """Build one call per candidate of each prompt; all share one deadline."""
        timeout_s = self._settings.generation_timeout_s
        deadline_s = deadline_after(request.request_options.limit_timeout(timeout_s))
        client = current_client(self._settings.limits.trusted_proxies)
        options = request.options
        if request.candidates > request.choices and options.logprobs is None:
            options = options._replace(logprobs=0)  # the ranking needs those of the tokens
        if not self._settings.cache.shared:
            options = options._replace(prefix_cache_scope=current_caller().name)
        return GenerationPlan(
            model=model,
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
            prompts=len(request.prompts),
            deadline_s=deadline_s,
            waits_for_model=bool(request.request_options.wait_for_model),
        )

    async def complete(self, plan: GenerationPlan) -> list[Completion]:
        """Run all calls; if one fails, cancel the others. Raises ServeError."""
        return await gather_or_cancel(
            [self._complete(plan, number) for number in range(len(plan.calls))]
        )

    async def stream(
        self, plan: GenerationPlan, on_end: Callable[[GenerationStream, int], None]
    ) -> GenerationStream:
        """Return the stream once every prompt has started. Raises ServeError.

        `on_end` is called once, with the HTTP status that the request ends with.
        """
        client = self._clients[plan.device]
        sources = [client.stream(call) for call in plan.calls]
        stream = GenerationStream(
            plan.model,
            lambda status: on_end(stream, status),
            max_buffered_tokens=self._settings.stream_buffer_tokens,
            choices_per_prompt=plan.candidates,
            fallback=plan.fallback,
        )
        await stream.start(sources, lambda number: self._with_timeout(plan, number))
        return stream

    async def _complete(self, plan: GenerationPlan, number: int) -> Completion:
        async with self._with_timeout(plan, number):
            return await self._clients[plan.device].complete(plan.calls[number])

    @asynccontextmanager
    async def _with_timeout(self, plan: GenerationPlan, number: int) -> AsyncIterator[None]:
        """Bound a call by its deadline and the cold start; rename the fields of its errors."""
        wait_s = None if plan.waits_for_model else self._settings.cold_start_wait_s
        message = f"generation took longer than {self._settings.generation_timeout_s:g} s"
        async with (
            limit_cold_start(self._monitor, plan.model, plan.device, wait_s),
            enforce_deadline(plan.deadline_s, message),
        ):
            with rename_error_fields(plan.call_field_names(number)):
                yield
