"""When a request began, and how many bytes of bodies all of them together may hold."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.config import LimitSettings
from deployments.errors import Overloaded

SCOPE_KEY = "hundredfold.body_account"


class BodyAccounts:
    """Middleware that gives each request an account; what it holds is free when it is answered."""

    def __init__(self, app: ASGIApp, limits: Callable[[], LimitSettings]) -> None:
        self.held_bytes = 0
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its account."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        account = BodyAccount(self)
        try:
            scope[SCOPE_KEY] = account
            await self._app(scope, receive, send)
        finally:
            self.held_bytes -= account.held_bytes

    @property
    def limit_bytes(self) -> int:
        """What may be held at once, as configured now."""
        return self._limits().inflight_body_bytes


class BodyAccount:
    """What one request holds."""

    def __init__(self, accounts: BodyAccounts) -> None:
        self.began_s = time.perf_counter()
        self.held_bytes = 0
        self._accounts = accounts

    def charge(self, size: int) -> None:
        """Hold `size` bytes more. Raises Overloaded when all requests together hold too many."""
        if self._accounts.held_bytes + size > self._accounts.limit_bytes:
            raise Overloaded("too many bytes of requests are being worked on")
        self._accounts.held_bytes += size
        self.held_bytes += size
