"""Deadlines of requests, from the arrival at the server to the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.request_headers import ARRIVAL_HEADER
from tests.support.artifacts import EMBEDDER
from tests.support.fakes import HangingEncoder, wait_until
from tests.support.in_process import InProcess
from tests.support.loop_clock import LoopClock

EMBED = f"/models/{EMBEDDER}"


async def test_deadline_of_the_client_ends_its_request(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, encoder = LoopClock(monkeypatch), HangingEncoder()
    async with InProcess(tiny_store, encoder=encoder).client() as http:
        body = {"inputs": "a", "options": {"deadline_ms": 20_000}}
        answer = asyncio.ensure_future(http.post(EMBED, json=body))
        await wait_until(lambda: encoder.batches == 1)
        await clock.advance(20.0)
        response = await answer
    assert (response.status_code, response.json()["code"]) == (504, "deadline_exceeded")
    assert encoder.cancelled == 1


async def test_slow_body_counts_against_the_deadline(tiny_store: Path) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        yield b'{"inputs": "a", '
        await asyncio.sleep(0.3)
        yield b'"options": {"deadline_ms": 200}}'

    async with InProcess(tiny_store).client() as http:
        assert (await http.post(EMBED, json={"inputs": "opens the model"})).status_code == 200
        response = await http.post(EMBED, content=trickle())
    assert (response.status_code, response.json()["code"]) == (504, "deadline_exceeded")


async def test_wait_before_the_ingress_counts_against_the_deadline(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        for waited_s, status in ((0.1, 200), (61, 504)):
            arrived_ms = round((time.time() - waited_s) * 1000)
            headers = {ARRIVAL_HEADER: str(arrived_ms), "x-request-timeout-ms": "60000"}
            response = await http.post(EMBED, json={"inputs": f"{waited_s}"}, headers=headers)
            assert response.status_code == status
