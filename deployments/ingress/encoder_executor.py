"""Execution of a resolved request on an encoder, through the response cache."""

from __future__ import annotations

from deployments.artifacts.types import Device
from deployments.config import IngressUserConfig
from deployments.errors import Overloaded
from deployments.ingress.devices.cluster_state import ClusterMonitor
from deployments.ingress.devices.cold_start import limit_cold_start
from deployments.ingress.micro_batches import MicroBatchDispatcher
from deployments.ingress.refusals import RecentRefusals
from deployments.ingress.request_options import RequestOptions
from deployments.ingress.requests import ResolvedRequest
from deployments.ingress.response_cache import ResponseCache, response_bytes
from deployments.keys.caller import current_caller
from deployments.messages import BatchKey, Call, CallResult, CallTimings, ModelRef


class EncoderExecutor:
    """Executor that answers from the response cache, else sends the call in a micro-batch."""

    def __init__(self, dispatcher: MicroBatchDispatcher, monitor: ClusterMonitor) -> None:
        self._settings = IngressUserConfig()
        self.cache: ResponseCache[CallResult] = ResponseCache(self._settings.cache, response_bytes)
        self._dispatcher = dispatcher
        self._monitor = monitor
        self._refusals = RecentRefusals()
        self._in_flight = 0

    def configure(self, settings: IngressUserConfig) -> None:
        """Apply new settings to later requests."""
        self._settings = settings
        self.cache.configure(settings.cache)
        self._dispatcher.configure(settings.batching)

    def uses_cache(self, options: RequestOptions) -> bool:
        return options.use_cache is not False and self._settings.cache.max_bytes > 0

    async def execute(self, request: ResolvedRequest) -> tuple[CallResult, bool]:
        """Return the result and whether it came from the cache. Raises ServeError."""
        is_long = request.characters > self._settings.batching.long_call_chars
        key = BatchKey(request.model.ref, request.task, request.device, is_long)
        if not self.uses_cache(request.options):
            return await self._compute(key, request), False
        scope = "" if self._settings.cache.shared else current_caller().name
        cache_key = (key, request.inputs, scope)
        cached = self.cache.get(cache_key)
        if cached is not None:
            # Keep the token count for the `usage` in the response.
            timings = CallTimings(tokens=cached.timings.tokens)
            return cached._replace(compute_type="cache", timings=timings), True
        result = await self.cache.compute_once(
            cache_key,
            lambda: self._compute(key, request),
            request.deadline_s,
            variant=(bool(request.options.wait_for_model), request.options.priority),
        )
        return result, False

    async def load(self, model: ModelRef, device: Device) -> None:
        """Let a replica load a model and run a test input. Raises ServeError."""
        await self._dispatcher.load(model, device)

    async def _compute(self, key: BatchKey, request: ResolvedRequest) -> CallResult:
        # Key for RecentRefusals. The model is part of it, because models differ in cost per call.
        queue = (key.model, key.task, key.device, request.client, request.options.priority)
        if self._in_flight:  # earlier refusals are outdated if no call is in flight
            self._refusals.check(queue, request.characters, request.deadline_s)
        call = Call(
            texts=request.inputs.texts,
            fields=request.inputs.fields,
            options=request.inputs.options,
            truncation=request.inputs.truncation,
            deadline_s=request.deadline_s,
            windowing=request.inputs.windowing,
            client=request.client,
            priority=request.options.priority_index,
        )
        wait_s = None if request.options.wait_for_model else self._settings.cold_start_wait_s
        self._in_flight += 1
        try:
            async with limit_cold_start(self._monitor, request.model, key.device, wait_s):
                return await self._dispatcher.run(key, call)
        except Overloaded as error:
            self._refusals.note(queue, request.characters, error)
            raise
        finally:
            self._in_flight -= 1
