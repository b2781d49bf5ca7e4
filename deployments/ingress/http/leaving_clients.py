"""Cancellation of requests whose clients disconnect before the answer, to free resources.

Ray Serve can watch for disconnects too, with two tasks per request that take 35 µs. A header that
HAProxy adds turns this off (cluster/edge/haproxy_config.py). Most requests end before WATCH_AFTER_S
and need no watch.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive, Scope

from deployments.ingress.http.bodies import BODY_KEY
from deployments.ingress.http.sse import wait_for_disconnect

WATCH_AFTER_S = 0.1


class ClientWatch:
    """Context manager that cancels its block, without an error, when the client disconnects."""

    __slots__ = ("_has_left", "_receive", "_scope", "_task", "_timer", "_watching")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self._watching: asyncio.Task[None] | None = None
        self._has_left = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "bug: not in a task"
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._has_left and kind is asyncio.CancelledError:
            return self._task.uncancel() == 0  # above 0: also cancelled for another reason
        return False

    def _begin(self) -> None:
        if self._scope["method"] == "POST" and BODY_KEY not in self._scope:
            # While the handler reads the body, the handler itself detects a disconnect. Check again
            # later. POST handlers that read no body load or unload models. They should finish even
            # after a disconnect.
            self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)
        else:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        await wait_for_disconnect(self._receive)
        self._has_left = True
        self._task.cancel()
