"""For those who run the service: health, readiness, metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from deployments.ingress.codec import json_response
from deployments.ingress.exposition import Gather
from deployments.ingress.service import InferenceService

EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class OperationsRoutes:
    """Handlers of the family."""

    def __init__(self, service: InferenceService, gather: Gather) -> None:
        self._service = service
        self._gather = gather

    def routes(self) -> list[Route]:
        """Paths probes and scrapers expect."""
        return [
            Route("/", self.health, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        """This process answers."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 when requests without special wishes can be answered, else 503 with the reasons."""
        service = self._service
        missing = service.board.missing()
        if not any(True for _ in service.registry.open_models()):
            missing.append("no model could be opened")
        body = {
            "ready": not missing,
            "missing": missing,
            "lanes": {
                device.value: {"available": state.available, "replicas": state.running}
                for device, state in service.board.states.items()
            },
            "refused": {k: e.message for k, e in service.registry.refused().items()},
        }
        return json_response(body, status=503 if missing else 200)

    async def metrics(self, request: Request) -> Response:
        """Prometheus text of the whole cluster."""
        return PlainTextResponse(await self._gather(), media_type=EXPOSITION_TYPE)
