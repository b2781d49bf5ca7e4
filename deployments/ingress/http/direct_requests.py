"""Requests that skip Ray Serve's request wrapper, which takes 23 % of the ingress's CPU time.

These requests also skip the wrapper's access log, metrics, traces and the limits
`max_ongoing_requests` and `max_queued_requests`. The ingress has metrics and limits of its own. A
replica that stops still finishes its requests, because Ray Serve waits for the HTTP server.
"""

from __future__ import annotations

import logging
from secrets import token_hex

from starlette.types import ASGIApp, Receive, Scope, Send

SERVE_PATHS = "/-/"  # paths that Ray Serve answers itself, such as its health check
REQUEST_ID_HEADER = b"x-request-id"
REQUEST_ID_KEY = "hundredfold.request_id"  # in the scope: the id to send with the response

log = logging.getLogger("ray.serve.hundredfold")


class DirectRequests:
    """Dispatcher that sends requests below the prefix of `app` to `app`, others to the wrapper.

    Requests for SERVE_PATHS always go to the wrapper. So does the first request, usually a health
    check: the prefix is known only from the scope of a request that has passed the wrapper.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._prefix: str | None = None

    def around(self, wrapper: ASGIApp) -> ASGIApp:
        """Return an application to use in place of `wrapper`, Ray Serve's wrapper of `app`."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            if self._is_direct(scope):
                scope["root_path"] = self._prefix
                await self._call(scope, receive, send)
            else:
                await wrapper(scope, receive, send)
                if scope["type"] == "http":
                    self._prefix = scope.get("root_path", "")

        return call

    def _is_direct(self, scope: Scope) -> bool:
        if self._prefix is None or scope["type"] != "http":
            return False
        path, start = scope["path"], len(self._prefix)
        return (
            path.startswith(self._prefix)
            and path.startswith("/", start)
            and not path.startswith(SERVE_PATHS, start)
        )

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[REQUEST_ID_KEY] = _find_request_id(scope) or token_hex(16).encode()
        try:
            await self._app(scope, receive, send)
        except Exception:
            # Ray Serve disables the log of uvicorn, so uvicorn would only close the connection.
            log.exception("response of %s failed", scope["path"])
            raise


def _find_request_id(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER:
            found: bytes = value
            return found
    return None
