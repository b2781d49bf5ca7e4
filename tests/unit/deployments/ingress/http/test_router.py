from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message

from deployments.capacity import Capacity
from deployments.config import CorsSettings
from deployments.errors import ServeError
from deployments.ingress.http import router
from deployments.ingress.http.api import ErrorFormat
from deployments.ingress.http.application import HttpApplication, ServerHooks
from deployments.ingress.http.cors import Cors
from deployments.ingress.http.gate import AccessGate
from deployments.ingress.http.large_responses import LargeResponseSender
from deployments.ingress.http.router import RouteTable
from tests.support.operation_routes import build_route


@asynccontextmanager
async def no_lifespan() -> AsyncIterator[None]:
    yield


async def tell_info(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"info {request.path_params['id']}")


async def tell_model(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"model {request.path_params['id']}")


async def fail(request: Request) -> Response:
    raise RuntimeError("a bug with a secret")


def teapot(error: ServeError) -> Response:
    return PlainTextResponse(error.message, 418)


ROUTES = [
    build_route("/models/{id:path}/info", tell_info, "GET"),
    build_route("/models/{id:path}", tell_model),
    build_route("/models/{id:path}", tell_info, "GET"),
    build_route("/fail", fail, error_format=ErrorFormat("Teapot", teapot)),
]


def large_sender() -> LargeResponseSender:
    return LargeResponseSender(Capacity(lambda: 1_000_000, "bytes"), lambda: 30.0)


def build_app(rejections: list[ServeError] | None = None) -> HttpApplication:
    recorded = [] if rejections is None else rejections
    return HttpApplication(
        RouteTable(ROUTES),
        AccessGate(),
        Cors(CorsSettings()),
        Capacity(lambda: 1_000, "body bytes"),
        large_sender(),
        ServerHooks(lambda error, _seconds: recorded.append(error), no_lifespan, lambda: 0),
    )


@pytest.fixture
def app() -> HttpApplication:
    return build_app()


def client(app: HttpApplication, root_path: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, root_path=root_path)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_cached_path_keeps_its_route_and_id(app: HttpApplication) -> None:
    async with client(app) as http:
        for _ in range(2):
            assert (await http.get("/models/a/b/info")).text == "info a/b"
            assert (await http.post("/models/a/b")).text == "model a/b"
            assert (await http.post("/models/c")).text == "model c"


async def test_unmatched_requests_are_rejected_each_time(app: HttpApplication) -> None:
    async with client(app) as http:
        for _ in range(2):
            assert (await http.get("/nothing")).status_code == 404
            assert (await http.put("/models/a")).status_code == 405
            assert (await http.post("/models/a")).status_code == 200


async def test_wrong_method_lists_all_methods_of_the_path(app: HttpApplication) -> None:
    async with client(app) as http:
        rejected = await http.put("/models/a")
    assert (rejected.status_code, rejected.headers["allow"]) == (405, "GET, HEAD, POST")


async def test_route_cache_is_bounded(
    app: HttpApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "MAX_CACHED_ROUTES", 3)
    async with client(app) as http:
        responses = [(await http.post(f"/models/{i}")).text for i in range(10)]
    assert responses == [f"model {i}" for i in range(10)]
    assert len(app.table._cached) <= 3


async def test_long_path_is_served_and_not_cached(
    app: HttpApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "MAX_CACHED_ROUTES", 1)
    async with client(app) as http:
        await http.post("/models/a")
        assert (await http.post("/models/" + "a" * 5_000)).status_code == 200
    assert [path for _, path in app.table._cached] == ["/models/a"]


async def test_slash_at_the_end_and_prefix_of_the_application_are_ignored(
    app: HttpApplication,
) -> None:
    async with client(app) as http:
        assert (await http.post("/models/a/b/")).text == "model a/b"
    async with client(app, root_path="/prefix") as http:
        assert (await http.post("/prefix/models/a/b")).text == "model a/b"


@pytest.mark.parametrize("path", ["//models/a/b", "/models/a///b", "///models/a//b//"])
async def test_slashes_after_slashes_are_ignored(path: str, app: HttpApplication) -> None:
    """Clients join base URLs that end in a slash with paths that begin with one."""
    async with client(app) as http:
        assert (await http.post(f"http://test{path}")).text == "model a/b"


async def test_slashes_after_models_stand_for_an_empty_id(app: HttpApplication) -> None:
    async with client(app) as http:
        assert (await http.post("http://test/models//a/b")).text == "model /a/b"


async def test_unexpected_failure_is_answered_without_details_and_recorded() -> None:
    rejections: list[ServeError] = []
    async with client(build_app(rejections)) as http:
        response = await http.post("/fail")
    assert (response.status_code, "secret" in response.text) == (418, False)
    assert [type(error) for error in rejections] == [ServeError]


async def test_websocket_is_refused(app: HttpApplication) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"type": "websocket", "path": "/models/a"}, receive, send)
    assert sent == [{"type": "websocket.close"}]


async def test_lifespan_is_entered_and_left() -> None:
    events = []

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        events.append("begun")
        yield
        events.append("ended")

    app = HttpApplication(
        RouteTable([]),
        AccessGate(),
        Cors(CorsSettings()),
        Capacity(lambda: 1, "body bytes"),
        large_sender(),
        ServerHooks(lambda error, seconds: None, lifespan, lambda: 0),
    )
    messages = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> Message:
        return {"type": next(messages)}

    async def send(message: Message) -> None:
        events.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    assert events == [
        "begun",
        "lifespan.startup.complete",
        "ended",
        "lifespan.shutdown.complete",
    ]


def test_operation_route_matches_a_model_id_with_a_line_break() -> None:
    route = build_route("/models/{id:path}/predict", fail)
    assert route.match("/models/a\nb/predict") == {"id": "a\nb"}


@pytest.mark.parametrize("path", ["/metrics", "/models/{id:path}/rollback"])
def test_line_break_at_the_end_does_not_hide_an_operation_from_rules_of_haproxy(path: str) -> None:
    route = build_route(path, fail)
    requested = path.replace("{id:path}", "a/b")
    assert route.match(requested) is not None
    assert route.match(f"{requested}\n") is None
