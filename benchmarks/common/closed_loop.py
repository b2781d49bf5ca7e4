"""Closed loop: a constant number of clients, of which each sends one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def run_clients(
    clients: int, requests: Iterable[T], send: Callable[[T], Awaitable[None]]
) -> None:
    """Send each of `requests` once, in order. `send` waits for the answer and stores it.

    If a request fails, the others are cancelled and the error is raised.
    """
    waiting = iter(requests)

    async def run_client() -> None:
        for request in waiting:
            await send(request)

    tasks = [asyncio.create_task(run_client()) for _ in range(clients)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
