from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message

from deployments.errors import ServeError
from deployments.ingress.http import router
from deployments.ingress.http.router import CachingRouter


@asynccontextmanager
async def no_lifespan(app: Starlette) -> AsyncIterator[None]:
    yield


async def tell_info(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"info {request.path_params['id']}")


async def tell_model(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"model {request.path_params['id']}")


@pytest.fixture
def app() -> Starlette:
    app = Starlette()
    app.router = CachingRouter(
        [
            Route("/models/{id:path}/info", tell_info, methods=["GET"]),
            Route("/models/{id:path}", tell_model, methods=["POST"]),
            Route("/models/{id:path}", tell_info, methods=["GET"]),
        ],
        no_lifespan,
    )
    return app


def client(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_cached_path_keeps_its_route_and_id(app: Starlette) -> None:
    async with client(app) as http:
        for _ in range(2):
            assert (await http.get("/models/a/b/info")).text == "info a/b"
            assert (await http.post("/models/a/b")).text == "model a/b"
            assert (await http.post("/models/c")).text == "model c"


async def test_unmatched_requests_are_rejected_each_time(app: Starlette) -> None:
    async with client(app) as http:
        for _ in range(2):
            assert (await http.get("/nothing")).status_code == 404
            assert (await http.put("/models/a")).status_code == 405
            assert (await http.post("/models/a")).status_code == 200


async def test_wrong_method_lists_all_methods_of_the_path(app: Starlette) -> None:
    async with client(app) as http:
        rejected = await http.put("/models/a")
    assert (rejected.status_code, rejected.headers["allow"]) == (405, "GET, HEAD, POST")


async def test_route_cache_is_bounded(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "MAX_CACHED_ROUTES", 3)
    async with client(app) as http:
        responses = [(await http.post(f"/models/{i}")).text for i in range(10)]
    assert responses == [f"model {i}" for i in range(10)]
    assert len(app.router._cached) <= 3


async def test_long_path_is_served_and_not_cached(
    app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "MAX_CACHED_ROUTES", 1)
    async with client(app) as http:
        await http.post("/models/a")
        assert (await http.post("/models/" + "a" * 5_000)).status_code == 200
    assert [path for _, path, _ in app.router._cached] == ["/models/a"]


async def test_lifespan_is_entered_and_left() -> None:
    responses = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        responses.append("begun")
        yield
        responses.append("ended")

    app = Starlette()
    app.router = CachingRouter([], lifespan)
    messages = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> Message:
        return {"type": next(messages)}

    async def send(message: Message) -> None:
        responses.append(message["type"])

    await app({"type": "lifespan", "state": {}}, receive, send)
    assert responses == [
        "begun",
        "lifespan.startup.complete",
        "ended",
        "lifespan.shutdown.complete",
    ]


async def test_operation_route_matches_a_model_id_with_a_line_break() -> None:
    async def handler(request: Request) -> Response:
        return PlainTextResponse(request.path_params["id"])

    def error_format(error: ServeError) -> Response:
        return PlainTextResponse(error.message)

    route = router.OperationRoute("/models/{id:path}/predict", handler, "POST", error_format)
    app = Starlette(routes=[route])
    async with client(app) as http:
        assert (await http.post("/models/a%0Ab/predict")).text == "a\nb"
