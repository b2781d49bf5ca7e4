"""Tests of `max_time`, which ends generation early and returns the tokens so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import wait_until
from tests.support.in_process import InProcess
from tests.support.loop_clock import LoopClock
from tests.support.scripted_generation import (
    CHUNKS,
    MODELS,
    TEXT,
    ScriptedGenerator,
    ask,
    events_in,
)

HANGS = CHUNKS[:2]  # three tokens; then the generator hangs
MAX_TIME_S = 20  # below the 30 s after which a silent stream gets a comment


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> LoopClock:
    return LoopClock(monkeypatch)


def body(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "Once", "parameters": {"details": True, **parameters}}


async def end_by_max_time(
    clock: LoopClock,
    generator: ScriptedGenerator,
    asking: Coroutine[Any, Any, httpx.Response],
    *,
    hung: int = 1,
) -> httpx.Response:
    """Send a request. Let MAX_TIME_S pass once `hung` streams hang; return the response."""
    response = asyncio.ensure_future(asking)
    await wait_until(lambda: generator.hung == hung)
    assert not response.done()
    await clock.advance(MAX_TIME_S)
    return await response


async def test_max_time_returns_the_tokens_generated_by_then(
    writing_store: Path, clock: LoopClock
) -> None:
    generator = ScriptedGenerator(chunks=HANGS)
    asking = ask(writing_store, generator, "/generate", body(max_time=MAX_TIME_S))
    started_s = time.perf_counter()
    response = await end_by_max_time(clock, generator, asking)
    elapsed_ms = 1e3 * (time.perf_counter() - started_s)
    result = response.json()
    assert result["generated_text"] == TEXT
    assert result["details"]["finish_reason"] == "length"
    assert result["details"]["generated_tokens"] == len(result["details"]["tokens"]) == 3
    assert 0 <= float(response.headers["x-total-time"]) <= elapsed_ms
    assert generator.running == 0


async def test_max_time_not_reached_has_no_effect(writing_store: Path) -> None:
    generator = ScriptedGenerator()
    unbounded = await ask(writing_store, generator, "/generate", body())
    bounded = await ask(writing_store, generator, "/generate", body(max_time=60))
    assert bounded.json() == unbounded.json()


async def test_completion_before_max_time_is_recorded_once(writing_store: Path) -> None:
    server = InProcess(writing_store, models=MODELS, generator=ScriptedGenerator())
    async with server.client() as http:
        for path in ("/generate", "/generate_stream"):
            await http.post(path, json=body(max_time=60))
    assert [record.status for record in server.recorder.records] == [200, 200]


async def test_completion_ended_by_max_time_is_recorded_once(
    writing_store: Path, clock: LoopClock
) -> None:
    generator = ScriptedGenerator(chunks=HANGS)
    server = InProcess(writing_store, models=MODELS, generator=generator)
    async with server.client() as http:
        for hung, path in enumerate(("/generate", "/generate_stream"), start=1):
            asking = http.post(path, json=body(max_time=MAX_TIME_S))
            await end_by_max_time(clock, generator, asking, hung=hung)
    assert [record.status for record in server.recorder.records] == [200, 200]
    # two prompt tokens, three generated tokens
    assert [record.timings.tokens for record in server.recorder.records] == [5, 5]


async def test_max_time_ends_each_of_several_sequences(
    writing_store: Path, clock: LoopClock
) -> None:
    generator = ScriptedGenerator(chunks=HANGS)
    request_body = body(max_time=MAX_TIME_S, num_return_sequences=2, do_sample=True, seed=1)
    asking = ask(
        writing_store, generator, f"/models/{DECODER}", {**request_body, "inputs": ["a", "b"]}
    )
    response = await end_by_max_time(clock, generator, asking, hung=4)
    result = [[one["generated_text"] for one in answers] for answers in response.json()]
    assert result == [["a" + TEXT] * 2, ["b" + TEXT] * 2]
    assert len(generator.calls) == 4
    assert generator.running == 0


async def test_max_time_ends_a_stream_with_the_text_so_far(
    writing_store: Path, clock: LoopClock
) -> None:
    generator = ScriptedGenerator(chunks=HANGS)
    asking = ask(writing_store, generator, "/generate_stream", body(max_time=MAX_TIME_S))
    response = await end_by_max_time(clock, generator, asking)
    *others, last = events_in(response.content)
    assert [event["token"]["text"] for event in others] == [" a", " ti", "me"]
    assert (last["index"], last["token"]["text"]) == (4, "")
    assert last["generated_text"] == TEXT
    assert (last["details"]["finish_reason"], last["details"]["generated_tokens"]) == ("length", 3)
    assert generator.running == 0


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_max_time_before_the_first_token_is_an_error(path: str, writing_store: Path) -> None:
    server = InProcess(writing_store, models=MODELS, generator=SlowStart())
    async with server.client() as http:
        response = await http.post(path, json=body(max_time=0.05))
    assert (response.status_code, response.json()["error_type"]) == (504, "incomplete_generation")
    assert "max_time" in response.json()["error"]
    assert [record.status for record in server.recorder.records] == [504]


class SlowStart(ScriptedGenerator):
    """Generator that never returns the first token."""

    async def stream(self, call: Any) -> Any:
        await asyncio.Event().wait()
        yield
