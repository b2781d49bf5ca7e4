"""Deadlines of requests, from the arrival at the server to the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.artifacts.types import Device
from deployments.config import IngressUserConfig
from deployments.errors import DeadlineExceeded, ModelLoading
from deployments.ingress.devices import cluster_state
from deployments.request_headers import ARRIVAL_HEADER
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import TIMEOUT_S, HangingEncoder, wait_until
from tests.support.generation_harness import ASKED, GenerationHarness, read_chunks
from tests.support.generators import ScriptedReply
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


async def test_generation_beyond_its_deadline_raises_deadline_exceeded(
    writing_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, settings = LoopClock(monkeypatch), IngressUserConfig(generation_timeout_s=60)
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply(hangs=True), settings)
    asking = asyncio.ensure_future(harness.pipeline.complete(ASKED))
    await wait_until(lambda: harness.generator.open == 1)
    await clock.advance(60)
    with pytest.raises(DeadlineExceeded, match="the deadline of the request"):
        await asking
    stream = await harness.pipeline.stream(ASKED)
    await clock.advance(60)
    with pytest.raises(DeadlineExceeded):
        _ = [part async for part in read_chunks(stream)]
    await stream.aclose()
    assert harness.is_idle()
    assert harness.statuses == [504, 504]


async def test_cold_generator_raises_model_loading_after_the_wait(
    writing_store: Path,
) -> None:
    settings = IngressUserConfig(cold_start_wait_s=0.02, generation_timeout_s=0.2)
    harness = GenerationHarness(
        writing_store, lambda call: ScriptedReply(is_silent=True), settings, running=0
    )
    for ask in (harness.pipeline.complete, harness.pipeline.stream):
        with pytest.raises(ModelLoading, match=DECODER):
            await ask(ASKED)
    assert harness.is_idle()
    assert harness.statuses == [503, 503]


async def test_generator_that_starts_during_the_wait_continues(
    writing_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_state, "STATUS_TIMEOUT_S", TIMEOUT_S)
    clock = LoopClock(monkeypatch)
    settings = IngressUserConfig(cold_start_wait_s=20, generation_timeout_s=100)
    harness = GenerationHarness(
        writing_store, lambda call: ScriptedReply(hangs=True), settings, running=0
    )
    asking = asyncio.ensure_future(harness.pipeline.complete(ASKED))
    await wait_until(lambda: harness.generator.open == 1)
    harness.running = 1
    await clock.advance(20)
    states = harness.pipeline.monitor
    await wait_until(lambda: states.generator_states[Device.CPU].running == 1)
    assert not asking.done()
    await clock.advance(80)
    with pytest.raises(DeadlineExceeded):
        await asking
