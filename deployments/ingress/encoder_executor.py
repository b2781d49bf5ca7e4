"""Execution of a resolved request on an encoder, through the response cache."""

from __future__ import annotations

import time

from deployments.config import IngressUserConfig
from deployments.errors import DeadlineExceeded
from deployments.ingress.cluster_state import ClusterMonitor, model_loading_error
from deployments.ingress.http.request_options import RequestOptions
from deployments.ingress.requests import ResolvedRequest
from deployments.ingress.response_cache import ResponseCache, response_bytes
from deployments.ingress.routing import MicroBatchRouter
from deployments.messages import BatchKey, Call, CallResult, EncoderTimings


class EncoderExecutor:
    """Cached results, else a call in a micro-batch."""

    def __init__(
        self, router: MicroBatchRouter, monitor: ClusterMonitor, settings: IngressUserConfig
    ) -> None:
        self.cache: ResponseCache[CallResult] = ResponseCache(settings.cache, response_bytes)
        self._router = router
        self._monitor = monitor
        self._settings = settings

    def configure(self, settings: IngressUserConfig) -> None:
        """Apply other settings to new requests."""
        self._settings = settings
        self.cache.configure(settings.cache)
        self._router.configure(settings.batching)

    def uses_cache(self, options: RequestOptions) -> bool:
        return options.use_cache is not False and self._settings.cache.max_bytes > 0

    async def execute(self, request: ResolvedRequest) -> tuple[CallResult, bool]:
        """Return the result and whether it came from the cache. Raises ServeError."""
        is_long = request.characters > self._settings.batching.long_call_chars
        key = BatchKey(request.model.ref, request.task, request.device, is_long)
        if not self.uses_cache(request.options):
            return await self._compute(key, request), False
        cache_key = (key, request.inputs)
        cached = self.cache.get(cache_key)
        if cached is not None:
            # The tokens still count in the client's `usage`.
            timings = EncoderTimings(tokens=cached.timings.tokens)
            return cached._replace(compute_type="cache", timings=timings), True
        result = await self.cache.compute_once(
            cache_key,
            lambda: self._compute(key, request),
            variant=bool(request.options.wait_for_model),
        )
        return result, False

    async def _compute(self, key: BatchKey, request: ResolvedRequest) -> CallResult:
        timeout_s = self._settings.timeout_s
        if self._monitor.states[key.device].running == 0 and not request.options.wait_for_model:
            timeout_s = min(timeout_s, self._settings.cold_start_wait_s)
        call = Call(
            texts=request.inputs.texts,
            fields=request.inputs.fields,
            options=request.inputs.options,
            truncation=request.inputs.truncation,
            deadline_s=time.time() + timeout_s,
            windowing=request.inputs.windowing,
        )
        try:
            return await self._router.run(key, call)
        except DeadlineExceeded:
            await self._monitor.refresh_with_timeout()
            if self._monitor.states[key.device].running == 0:
                raise model_loading_error(key.model.id) from None
            raise
