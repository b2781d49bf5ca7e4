"""Routes for operators: health, readiness, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from deployments.errors import ServeError
from deployments.ingress.apis.operations.metrics_text import Scrape
from deployments.ingress.http.api import Operation
from deployments.ingress.http.bodies import json_response
from deployments.ingress.service import InferenceService

EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class OperationsRoutes:
    """Handlers of the API."""

    name: ClassVar = "Operations"

    def __init__(self, service: InferenceService, gather: Scrape) -> None:
        self._service = service
        self._gather = gather

    def operations(self) -> Sequence[Operation]:
        status = {"type": "object", "properties": {"status": {"const": "ok"}}}
        return (
            Operation(
                method="GET",
                paths=("/", "/health", "/ping"),
                handler=self.health,
                summary="Health of this process",
                response=status,
            ),
            Operation(
                method="GET",
                paths=("/ready",),
                handler=self.ready,
                summary="Readiness of the cluster; 503 lists the reasons",
                response={"type": "object"},
                other_responses={503: {"type": "object"}},
            ),
            Operation(
                method="GET",
                paths=("/metrics",),
                handler=self.metrics,
                summary="Prometheus text of the whole cluster",
                response={"type": "string"},
                media_type="text/plain",
            ),
        )

    def owns(self, path: str) -> bool:
        """None: what goes wrong here is told in the words of the last family."""
        return False

    def error_response(self, error: ServeError) -> Response:
        return json_response({"error": error.message, "code": error.code}, status=error.status)

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Ready if requests without `options` can be answered."""
        service = self._service
        missing = service.monitor.missing()
        if not any(True for _ in service.registry.open_models()):
            missing.append("no model could be opened")
        body = {
            "ready": not missing,
            "missing": missing,
            "encoders": {
                device.value: {"available": state.available, "replicas": state.running}
                for device, state in service.monitor.states.items()
            },
            "refused": {k: e.message for k, e in service.registry.rejected().items()},
        }
        return json_response(body, status=503 if missing else 200)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(await self._gather(), media_type=EXPOSITION_TYPE)
