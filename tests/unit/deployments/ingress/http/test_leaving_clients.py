from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from deployments.ingress.http import leaving_clients
from deployments.ingress.http.bodies import BODY_KEY
from deployments.ingress.http.leaving_clients import ClientWatch


@pytest.fixture(autouse=True)
def _watch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_clients, "WATCH_AFTER_S", 0.0)


class LeavingClient:
    """A client that sends nothing and disconnects when `leaves` is set."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.receiving = 0

    async def receive(self) -> dict[str, Any]:
        self.receiving += 1
        await self.leaves.wait()
        return {"type": "http.disconnect"}


def scope(method: str = "POST", body: bytes | None = b"{}") -> dict[str, Any]:
    return {"method": method} if body is None else {"method": method, BODY_KEY: body}


@pytest.mark.parametrize("of_client", [scope(), scope("GET", None)])
async def test_client_that_leaves_ends_the_block_only(of_client: dict[str, Any]) -> None:
    client = LeavingClient()
    client.leaves.set()
    reached = []
    with ClientWatch(of_client, client.receive):
        await asyncio.sleep(60)
        reached.append("end of the block")
    assert reached == []
    await asyncio.sleep(0)  # does not raise: the cancellation ended with the block


async def test_client_that_stays_sees_the_end_of_the_block() -> None:
    client = LeavingClient()
    with ClientWatch(scope(), client.receive):
        while not client.receiving:
            await asyncio.sleep(0)
    client.leaves.set()
    await asyncio.sleep(0)
    assert client.receiving == 1


async def test_finished_watch_is_freed_without_a_garbage_collection() -> None:
    client = LeavingClient()
    gc.disable()
    try:
        with ClientWatch(scope(), client.receive) as watch:
            while not client.receiving:
                await asyncio.sleep(0)
        freed = weakref.ref(client)
        del client, watch
        for _ in range(3):  # let the watching task end
            await asyncio.sleep(0)
        assert freed() is None
    finally:
        gc.enable()


async def test_body_is_left_to_the_handler() -> None:
    client, post = LeavingClient(), scope(body=None)
    with ClientWatch(post, client.receive):
        for _ in range(20):
            await asyncio.sleep(0)
        assert client.receiving == 0
        post[BODY_KEY] = b"{}"
        while not client.receiving:
            await asyncio.sleep(0)


async def test_other_cancellations_and_errors_pass() -> None:
    async def hang() -> None:
        with ClientWatch(scope(), LeavingClient().receive):
            await asyncio.sleep(60)

    task = asyncio.ensure_future(hang())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ValueError, match="own"), ClientWatch(scope(), LeavingClient().receive):
        raise ValueError("own")


async def test_fast_request_starts_no_task() -> None:
    client = LeavingClient()
    with ClientWatch(scope(), client.receive):
        pass
    await asyncio.sleep(0.01)
    assert client.receiving == 0
