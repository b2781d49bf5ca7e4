"""Execution of a generation request on a generator: calls, deadline, cold start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deployments.artifacts.types import Device
from deployments.config import IngressUserConfig
from deployments.errors import DeadlineExceeded
from deployments.generation.messages import Completion, GenerationCall
from deployments.ingress.choices import gather_or_cancel, offset_seed
from deployments.ingress.cluster_state import ClusterMonitor, DeviceChoice, model_loading_error
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.requests import GenerationRequest
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
    deadline_s: float  # time.time
    cold: bool  # no replica runs, and the request does not wait for one

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
        deadline_s = time.time() + self._settings.generation_timeout_s
        options = request.options
        if request.candidates > request.choices and options.logprobs is None:
            options = options._replace(logprobs=0)  # the ranking needs those of the tokens
        return GenerationPlan(
            model=model,
            device=choice.device,
            fallback=choice.fallback,
            calls=tuple(
                GenerationCall(model.ref, prompt, offset_seed(options, candidate), deadline_s)
                for prompt in request.prompts
                for candidate in range(request.candidates)
            ),
            candidates=request.candidates,
            prompts=len(request.prompts),
            deadline_s=deadline_s,
            cold=self._is_cold(choice.device) and not request.request_options.wait_for_model,
        )

    async def complete(self, plan: GenerationPlan) -> list[Completion]:
        """Run all calls; if one fails, cancel the others. Raises ServeError."""
        return await gather_or_cancel(
            [self._complete(plan, number) for number in range(len(plan.calls))]
        )

    async def stream(
        self, plan: GenerationPlan, on_end: Callable[[GenerationStream, int], None]
    ) -> GenerationStream:
        """Return the stream once every completion has started. Raises ServeError.

        `on_end` is called once, with the HTTP status that the request ends with.
        """
        client = self._clients[plan.device]
        sources = [client.stream(call) for call in plan.calls]
        stream = GenerationStream(
            plan.model, lambda status: on_end(stream, status), fallback=plan.fallback
        )
        await stream.start(sources, lambda number: self._with_timeout(plan, number))
        return stream

    async def _complete(self, plan: GenerationPlan, number: int) -> Completion:
        async with self._with_timeout(plan, number):
            return await self._clients[plan.device].complete(plan.calls[number])

    @asynccontextmanager
    async def _with_timeout(self, plan: GenerationPlan, number: int) -> AsyncIterator[None]:
        """Bound a call by its deadline and rename the fields of its errors.

        A cold call ends after `cold_start_wait_s`, unless a replica has started meanwhile.
        Raises DeadlineExceeded or ModelLoading.
        """
        loop = asyncio.get_running_loop()
        cold_start: asyncio.Task[None] | None = None

        async def end_if_cold() -> None:
            await asyncio.sleep(self._settings.cold_start_wait_s)
            await self._monitor.refresh_with_timeout()
            if self._is_cold(plan.device):
                timeout.reschedule(loop.time())

        try:
            async with asyncio.timeout(plan.deadline_s - time.time()) as timeout:
                if plan.cold:
                    cold_start = asyncio.ensure_future(end_if_cold())
                with rename_error_fields(plan.call_field_names(number)):
                    yield
        except TimeoutError as exc:
            if not timeout.expired():
                raise
            if plan.cold and self._is_cold(plan.device):
                raise model_loading_error(plan.model.ref.id) from exc
            raise DeadlineExceeded(
                f"generation took longer than {self._settings.generation_timeout_s:g} s"
            ) from exc
        finally:
            if cold_start is not None:
                cold_start.cancel()

    def _is_cold(self, device: Device) -> bool:
        return self._monitor.generator_states[device].running == 0
