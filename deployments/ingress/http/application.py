"""The ASGI application: one function between the server and the handlers of the operations.

Starlette's own application passes a request through five layers, which took a third of the time of
a cached response. Handlers still use Starlette's Request and Response.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from statistics import mode
from typing import Any, NamedTuple
from weakref import ref

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.capacity import Capacity
from deployments.errors import (
    ClientDisconnected,
    MethodNotAllowed,
    Overloaded,
    ServeError,
    UnknownRoute,
    forget_frames,
)
from deployments.ingress.arrivals import CURRENT_ARRIVAL_S, read_arrival
from deployments.ingress.client_identity import CURRENT_SOURCE, RequestSource
from deployments.ingress.http.api import (
    ERROR_FORMAT_KEY,
    ErrorFormat,
    Operation,
    find_client_format,
    use_error_format,
)
from deployments.ingress.http.bodies import RESERVATION_KEY, BodyReservation
from deployments.ingress.http.cors import Cors
from deployments.ingress.http.current_request import CURRENT_REQUEST
from deployments.ingress.http.direct_requests import REQUEST_ID_KEY
from deployments.ingress.http.error_responses import (
    DEFAULT_ERROR_FORMAT,
    RecordRejection,
    mark_queue_refusal,
)
from deployments.ingress.http.errors import MAX_FIELD_CHARS, shorten_text, truncate_error
from deployments.ingress.http.gate import AccessGate
from deployments.ingress.http.large_responses import CHUNK_BYTES, LargeResponseSender
from deployments.ingress.http.leaving_clients import ClientWatch
from deployments.ingress.http.router import RouteTable, WrongMethod
from deployments.ingress.http.tracing import CURRENT_TRACE
from deployments.keys.caller import UNRESTRICTED, current_caller, set_current_caller

log = logging.getLogger("ray.serve.hundredfold")

METERED_KEY = "hundredfold.metered"  # scope key of the MeteredRequest; None without key limits
# Slashes that `route_path` merges. A model id is never empty, so those after `/models` stay: else
# `/models/$ORG/NAME` would name another model where the variable is empty.
SLASHES = re.compile("(?<!/models)//+")
Lifespan = Callable[[], AbstractAsyncContextManager[object]]
# Function that gets an admitted request and the path of its route, and may begin a trace.
BeginTrace = Callable[[Request, str], None]
# Function that gets the error of a handler. It returns to let the handler run again, or raises the
# final error.
Recover = Callable[[ServeError, Request], Awaitable[None]]


async def raise_again(error: ServeError, _request: Request) -> None:
    """Raise `error`. Use as `Recover` in servers that cannot remove the cause of an error."""
    raise error


def write_no_record() -> None:
    """Do nothing. Use as `write_record` in servers without records."""


def begin_no_trace(_request: Request, _route: str) -> None:
    """Do nothing. Use as `BeginTrace` in servers without traces."""


class ServerHooks(NamedTuple):
    """Functions that the server calls besides the handlers.

    `record_rejection` gets the error of every error response, also of clients that leave before it,
    and the elapsed seconds. `write_record` is called before each response, for the record of a
    request that was answered. `trusted_proxies` returns the setting `limits.trusted_proxies`. Each
    request runs inside the context `in_flight`, which several requests enter at the same time.
    `recover` gets the errors of routes that run a model, `begin_trace` the requests.
    """

    record_rejection: RecordRejection
    lifespan: Lifespan
    trusted_proxies: Callable[[], int]
    in_flight: AbstractContextManager[object] = nullcontext()
    recover: Recover = raise_again
    begin_trace: BeginTrace = begin_no_trace
    write_record: Callable[[], None] = write_no_record


class HttpApplication:
    """Application that routes requests, checks keys, limits bodies and builds error responses.

    Error responses have the error format of the route.
    """

    # Ray Serve labels its metrics with the route that it finds in `routes`. For this label, Ray
    # Serve would match all patterns again, which costs too much. Without routes, the label is the
    # prefix of the application.
    routes = ()
    redirect_slashes = False

    def __init__(
        self,
        table: RouteTable,
        gate: AccessGate,
        cors: Cors,
        body_bytes: Capacity,
        large_responses: LargeResponseSender,
        hooks: ServerHooks,
    ) -> None:
        self.table = table
        self._gate = gate
        self._cors = cors
        self._body_bytes = body_bytes
        self._large_responses = large_responses
        self._hooks = hooks

    @property
    def router(self) -> HttpApplication:
        """This application. Ray Serve reads `router.redirect_slashes`."""
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        else:  # a WebSocket: the server answers 403 if it is closed before it is accepted
            await send({"type": "websocket.close"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = BodyReservation(self._body_bytes)
        scope[RESERVATION_KEY] = body
        request = _Request(scope, receive, send)
        # Set each variable: the task may have the context of an earlier request, because uvicorn
        # starts a pipelined one inside the `send` of the response before it.
        CURRENT_REQUEST.set(ref(request))
        CURRENT_TRACE.set(None)
        set_current_caller(UNRESTRICTED)
        CURRENT_SOURCE.set(RequestSource(request.headers, self._hooks.trusted_proxies()))
        CURRENT_ARRIVAL_S.set(read_arrival(request.headers))
        response: Response | None = None
        try:
            with self._hooks.in_flight, ClientWatch(scope, receive):
                response = await self._handle(request, scope)
                reserved = None
                if len(getattr(response, "body", b"")) > CHUNK_BYTES:
                    try:
                        reserved = self._large_responses.reserve(response)
                    except Overloaded as error:
                        response = self._respond(scope, error)
                self._hooks.write_record()
                self._add_headers(request, response)
                if reserved is None:
                    await response(scope, receive, send)
                else:
                    await self._large_responses.send(response, reserved, send)
        finally:
            body.release()
            if (metered := scope.get(METERED_KEY)) is not None:
                metered.release()
            if (trace := CURRENT_TRACE.get()) is not None:
                trace.end(request, response)

    def _add_headers(self, request: Request, response: Response) -> None:
        """Add the headers that successes and errors share: CORS, limits of the key, request id."""
        self._cors.add_headers(request.headers, response)
        if (metered := request.scope.get(METERED_KEY)) is not None:
            response.raw_headers += metered.headers
        if (request_id := request.scope.get(REQUEST_ID_KEY)) is not None:
            error_format: ErrorFormat = request.scope.get(ERROR_FORMAT_KEY, DEFAULT_ERROR_FORMAT)
            names = error_format.request_id_headers
            response.raw_headers += [(name, request_id) for name in names]

    async def _handle(self, request: Request, scope: Scope) -> Response:
        try:
            path = route_path(scope)
            if scope["method"] == "OPTIONS" and (
                permission := self._cors.build_preflight(request.headers)
            ):
                return permission
            found = self.table.find(scope["method"], path)
            if found is None:
                raise self._build_unknown_route(path, request)
            scope["path_params"] = found.path_params
            scope[ERROR_FORMAT_KEY] = found.route.select_error_format(request.headers)
            operation = found.route.operation
            scope[METERED_KEY] = self._gate.admit(operation.access, request.headers)
            if operation.runs_model:
                self._hooks.begin_trace(request, found.route.path)
            if operation.changes_models:  # before: a client may leave, and the change goes on
                who = current_caller().name or "a client without a key"
                log.info("%s %r by %s", scope["method"], shorten_text(path, MAX_FIELD_CHARS), who)
            return await self._run(operation, request)
        except ServeError as error:
            return self._respond(scope, error)
        except WrongMethod as error:
            scope[ERROR_FORMAT_KEY] = error.route.select_error_format(request.headers)
            response = self._respond(
                scope, MethodNotAllowed(f"{path} does not support {request.method}")
            )
            response.headers["allow"] = ", ".join(sorted(error.allowed))
            return response
        except asyncio.CancelledError:
            self._record_rejection(scope, ClientDisconnected("the client left before its answer"))
            raise
        except Exception as error:
            # The client gets no details.
            log.error("unexpected failure on %s", scope["path"], exc_info=error)
            forget_frames(error)
            return self._respond(scope, ServeError("unexpected failure; see the log of the server"))

    def _build_unknown_route(self, path: str, request: Request) -> UnknownRoute:
        """Build an error that lists similar routes. Use their most common error format.

        A format of theirs that a header of the client selects takes precedence.
        """
        neighbors = self.table.find_neighbors(path)
        if not neighbors:
            return UnknownRoute(f"no route matches {path}; see /docs")
        formats = [each for route in neighbors for each in route.error_formats]
        client_format = find_client_format(formats, request.headers)
        use_error_format(
            request, client_format or mode(route.error_formats[0] for route in neighbors)
        )
        names = sorted({route.path for route in neighbors})
        verb = "are" if len(names) > 1 else "is"
        return UnknownRoute(f"no route matches {path}; there {verb} {', '.join(names)}; see /docs")

    async def _run(self, operation: Operation, request: Request) -> Response:
        try:
            return await operation.handler(request)
        except ServeError as error:
            if not operation.runs_model:
                raise
            forget_frames(error)
            await self._hooks.recover(error, request)
        return await operation.handler(request)

    def _record_rejection(self, scope: Scope, error: ServeError) -> None:
        body: BodyReservation = scope[RESERVATION_KEY]
        self._hooks.record_rejection(error, time.perf_counter() - body.started_s)

    def _respond(self, scope: Scope, error: ServeError) -> Response:
        self._record_rejection(scope, error)
        error_format: ErrorFormat = scope.get(ERROR_FORMAT_KEY, DEFAULT_ERROR_FORMAT)
        response = error_format.respond(truncate_error(error))
        response.headers.update(error.headers)
        mark_queue_refusal(response, error, scope)
        forget_frames(error)
        return response

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            async with self._hooks.lifespan():
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except Exception as error:
            log.error("the application did not start or stop", exc_info=error)
            await send({"type": "lifespan.startup.failed", "message": repr(error)})
            raise
        await send({"type": "lifespan.shutdown.complete"})


class _Headers(Headers):
    """Headers with look-ups in a dict, not a linear search. The first of equal names counts."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        # Each request looks up about twice as many names as it has headers.
        self._by_name = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self.raw)
        }

    def __getitem__(self, key: str) -> str:
        return self._by_name[key.lower()]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._by_name

    def get(self, key: str, default: Any = None) -> Any:
        return self._by_name.get(key.lower(), default)


class _Request(Request):
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self._headers = _Headers(scope)  # returned by Starlette's property `headers`


def route_path(scope: Scope) -> str:
    """Return the path below the application's prefix, with SLASHES merged and none at the end.

    Some clients append a slash, or join a base URL that ends in one with a path that begins with
    one. Not all clients follow redirects. HAProxy denies `/metrics` to clients in all these forms
    (cluster/edge/haproxy_config.py).
    """
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    if prefix and path.startswith(prefix):
        path = path[len(prefix) :]
    if "//" in path:
        path = SLASHES.sub("/", path)
    return path.rstrip("/") or "/"
