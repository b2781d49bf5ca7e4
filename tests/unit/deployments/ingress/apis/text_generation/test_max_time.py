"""Tests of `max_time`, which ends generation early and returns the tokens so far."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.decoder_artifacts import DECODER
from tests.support.in_process import InProcess
from tests.support.scripted_generation import (
    CHUNKS,
    MODELS,
    TEXT,
    ScriptedGenerator,
    ask,
    events_in,
)

HANGS = CHUNKS[:2]  # three tokens; then the generator hangs


def body(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "Once", "parameters": {"details": True, **parameters}}


async def test_max_time_returns_the_tokens_generated_by_then(writing_store: Path) -> None:
    generator = ScriptedGenerator(chunks=HANGS)
    response = await ask(writing_store, generator, "/generate", body(max_time=0.05))
    result = response.json()
    assert result["generated_text"] == TEXT
    assert result["details"]["finish_reason"] == "length"
    assert result["details"]["generated_tokens"] == len(result["details"]["tokens"]) == 3
    assert 40 <= float(response.headers["x-total-time"]) < 5_000
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


async def test_completion_ended_by_max_time_is_recorded_once(writing_store: Path) -> None:
    server = InProcess(writing_store, models=MODELS, generator=ScriptedGenerator(chunks=HANGS))
    async with server.client() as http:
        for path in ("/generate", "/generate_stream"):
            await http.post(path, json=body(max_time=0.05))
    assert [record.status for record in server.recorder.records] == [200, 200]
    # two prompt tokens, three generated tokens
    assert [record.timings.tokens for record in server.recorder.records] == [5, 5]


async def test_max_time_ends_each_of_several_sequences(writing_store: Path) -> None:
    generator = ScriptedGenerator(chunks=HANGS)
    request_body = body(max_time=0.05, num_return_sequences=2, do_sample=True, seed=1)
    response = await ask(
        writing_store, generator, f"/models/{DECODER}", {**request_body, "inputs": ["a", "b"]}
    )
    result = [[one["generated_text"] for one in answers] for answers in response.json()]
    assert result == [["a" + TEXT] * 2, ["b" + TEXT] * 2]
    assert len(generator.calls) == 4
    assert generator.running == 0


async def test_max_time_ends_a_stream_with_the_text_so_far(writing_store: Path) -> None:
    generator = ScriptedGenerator(chunks=HANGS)
    response = await ask(writing_store, generator, "/generate_stream", body(max_time=0.05))
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
