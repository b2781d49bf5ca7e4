"""Routes for operators: health, readiness, live figures, metrics and usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from deployments.ingress.apis.operations.live_statistics import (
    LiveStatistics,
    LiveStatisticsReader,
    RecentRequests,
    permitted_statistics,
)
from deployments.ingress.apis.operations.usage import KeyUsage, read_usage
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.http.api import Access, Operation, build_schema
from deployments.ingress.http.bodies import json_response
from deployments.ingress.http.error_responses import DEFAULT_ERROR_FORMAT

EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class OperationsRoutes:
    """Handlers for operators. The constructor adds a recorder of requests for `GET /stats`."""

    name: ClassVar = "Operations"
    error_format: ClassVar = DEFAULT_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline
        self._scrape_metrics = context.scrape_metrics
        recent = RecentRequests()
        self._pipeline.add_recorder(recent)
        self._live_statistics = LiveStatisticsReader(
            recent, self._pipeline.monitor, self._pipeline.admission, context.scrape_metrics
        )

    def operations(self) -> Sequence[Operation]:
        status = {"type": "object", "properties": {"status": {"const": "ok"}}}
        return (
            Operation(
                method="GET",
                paths=("/health", "/healthz", "/ping"),
                handler=self.health,
                summary="Health of this process",
                access=Access.PUBLIC,
                response=status,
            ),
            Operation(
                method="GET",
                paths=("/ready",),
                handler=self.ready,
                summary="Readiness of the cluster; 503 lists the reasons",
                access=Access.PUBLIC,
                response={"type": "object"},
                other_responses={503: {"type": "object"}},
            ),
            Operation(
                method="GET",
                paths=("/stats",),
                handler=self.stats,
                summary="Live figures: latency, rates, replicas; computed once a second",
                access=Access.INFER,
                response=build_schema(LiveStatistics),
            ),
            Operation(
                method="GET",
                paths=("/metrics",),
                handler=self.metrics,
                summary="Prometheus text of the whole cluster",
                access=Access.METRICS,
                response={"type": "string"},
                media_type="text/plain",
            ),
            Operation(
                method="GET",
                paths=("/usage",),
                handler=self.usage,
                summary="Requests, tokens and seconds of hardware per API key",
                access=Access.METRICS,
                response=build_schema(list[KeyUsage]),
            ),
        )

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Answer 200 if requests without `options` can be answered, else 503 with the reasons."""
        pipeline = self._pipeline
        missing = pipeline.list_missing()
        body = {
            "ready": not missing,
            "missing": missing,
            "encoders": {
                device.value: {"available": state.available, "replicas": state.running}
                for device, state in pipeline.monitor.encoder_states.items()
            },
            "refused": {k: e.message for k, e in pipeline.permitted.rejected().items()},
        }
        return json_response(body, status=503 if missing else 200)

    async def stats(self, request: Request) -> Response:
        return json_response(permitted_statistics(await self._live_statistics.read()))

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(await self._scrape_metrics(), media_type=EXPOSITION_TYPE)

    async def usage(self, request: Request) -> Response:
        usage = read_usage(await self._scrape_metrics())
        return json_response([key.model_dump() for key in usage])
