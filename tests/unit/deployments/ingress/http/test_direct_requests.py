from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.ingress.http.direct_requests import REQUEST_ID_KEY, DirectRequests


class ScopeLog:
    """An ASGI application that records the scopes of its calls."""

    def __init__(self, prefix: str | None = None) -> None:
        self.scopes: list[Scope] = []
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._prefix is not None:
            scope["root_path"] = self._prefix  # as Ray Serve does before it calls an application
        self.scopes.append(dict(scope))

    def paths(self) -> list[str]:
        return [scope["path"] for scope in self.scopes]


class Calls:
    """Client that sends requests through DirectRequests with the route prefix `prefix`.

    `direct` records the requests that skip Ray Serve's wrapper, `wrapped` all others.
    """

    def __init__(self, prefix: str = "") -> None:
        self.direct = ScopeLog()
        self.wrapped = ScopeLog(prefix)
        self.app: ASGIApp = DirectRequests(self.direct).around(self.wrapped)

    async def send(self, path: str, kind: str = "http", **headers: str) -> None:
        pairs = [(name.replace("_", "-").encode(), v.encode()) for name, v in headers.items()]
        await self.app({"type": kind, "path": path, "headers": pairs}, receive, drop)

    def paths(self) -> tuple[list[str], list[str]]:
        return self.direct.paths(), self.wrapped.paths()


async def receive() -> Any:
    raise AssertionError("no body is read")


async def drop(message: Any) -> None:
    pass


async def test_only_the_first_request_takes_the_wrapper() -> None:
    calls = Calls()
    for path in ("/models/a", "/models/b", "/"):
        await calls.send(path)
    assert calls.paths() == (["/models/b", "/"], ["/models/a"])


async def test_paths_of_ray_serve_and_web_sockets_take_the_wrapper() -> None:
    calls = Calls()
    await calls.send("/-/healthz")
    await calls.send("/-/routes")
    await calls.send("/models/a", kind="websocket")
    assert calls.paths()[0] == []
    await calls.send("/-")
    assert calls.paths()[0] == ["/-"]


async def test_web_socket_teaches_no_prefix() -> None:
    calls = Calls("/api")
    await calls.send("/api/socket", kind="websocket")
    await calls.send("/api/models")
    assert calls.paths()[0] == []


async def test_requests_below_the_prefix_get_it_as_root_path() -> None:
    calls = Calls("/api")
    for path in ("/-/healthz", "/api/models/a", "/api", "/apis/models/a", "/models/a"):
        await calls.send(path)
    assert calls.paths()[0] == ["/api/models/a"]
    assert calls.direct.scopes[0]["root_path"] == "/api"


async def test_request_id_of_the_client_is_kept_and_else_made() -> None:
    calls = Calls()
    await calls.send("/-/healthz")
    await calls.send("/", x_request_id="mine")
    await calls.send("/", accept="*/*")
    await calls.send("/")
    kept, *made = (scope[REQUEST_ID_KEY].decode() for scope in calls.direct.scopes)
    assert kept == "mine"
    assert len({UUID(one) for one in made}) == 2


async def test_failed_response_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise BrokenPipeError("the disk is gone")

    app = DirectRequests(fail).around(ScopeLog(""))
    scope: Scope = {"type": "http", "path": "/models", "headers": []}
    await app(dict(scope), receive, drop)
    with caplog.at_level(logging.ERROR, "ray.serve.hundredfold"), pytest.raises(BrokenPipeError):
        await app(scope, receive, drop)
    assert "/models" in caplog.text
    assert "the disk is gone" in caplog.text
