"""The HTTP request that the current task handles."""

from __future__ import annotations

from contextvars import ContextVar
from weakref import ref

from starlette.requests import Request

# A weak reference: tasks that a request starts, such as readers of connections, may outlive it, and
# their context would keep its body in memory.
CURRENT_REQUEST: ContextVar[ref[Request] | None] = ContextVar("request", default=None)


def current_request() -> Request | None:
    """Return the request that the current task handles; None outside of HTTP requests."""
    found = CURRENT_REQUEST.get()
    return None if found is None else found()
