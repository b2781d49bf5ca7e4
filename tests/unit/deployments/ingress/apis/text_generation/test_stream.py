"""Tests of streams: one event per token; the last event has the complete text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.errors import EngineFailed, InputTooLong, Overloaded, ServeError
from deployments.messages import Chunk, FinishReason, Token
from tests.support.asgi_client import AsgiClient
from tests.support.decoder_artifacts import DECODER
from tests.support.in_process import InProcess
from tests.support.scripted_generation import (
    CHUNKS,
    MODELS,
    TEXT,
    ScriptedGenerator,
    ask,
    ending,
    events_in,
)

STREAM = "/generate_stream"


async def events(writing_store: Path, parameters: dict[str, Any], **generator: Any) -> list[Any]:
    body = {"inputs": "Once upon", "parameters": parameters}
    response = await ask(writing_store, ScriptedGenerator(**generator), STREAM, body)
    assert response.status_code == 200
    return events_in(response.content)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (STREAM, {}),
        (f"/models/{DECODER}{STREAM}", {}),
        (f"/models/{DECODER}", {"stream": True}),
        ("/", {"stream": True}),
    ],
)
async def test_stream_has_an_event_per_token(
    path: str, more: dict[str, Any], writing_store: Path
) -> None:
    generator = ScriptedGenerator()
    body = {"inputs": "Once", "parameters": {"return_full_text": False}, **more}
    response = await ask(writing_store, generator, path, body)
    received = events_in(response.content)
    assert [event["index"] for event in received] == [1, 2, 3, 4]
    assert [event["token"]["text"] for event in received] == [" a", " ti", "me", ""]
    assert received[0] == {
        "index": 1,
        "token": {"id": 7, "text": " a", "logprob": -0.25, "special": False},
        "generated_text": None,
        "details": None,
    }
    assert [event["generated_text"] for event in received] == [None, None, None, TEXT]
    assert received[3]["token"] == {"id": 2, "text": "", "logprob": -0.125, "special": True}
    assert generator.running == 0


async def test_last_event_has_text_and_details(writing_store: Path) -> None:
    *others, last = await events(writing_store, {"details": True, "seed": 3, "do_sample": True})
    assert [event["details"] for event in others] == [None] * 3
    assert last["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 4,
        "input_length": 2,
        "seed": 3,
    }


async def test_last_of_several_tokens_of_the_last_chunk_has_text_and_details(
    writing_store: Path,
) -> None:
    chunks = [CHUNKS[0], CHUNKS[1]._replace(finished=ending(tokens=3))]
    received = await events(writing_store, {"details": True}, chunks=chunks)
    assert [event["generated_text"] for event in received] == [None, None, TEXT]
    assert [event["details"] is None for event in received] == [True, True, False]


async def test_return_full_text_affects_the_text_only(writing_store: Path) -> None:
    *_, last = received = await events(writing_store, {"return_full_text": True})
    assert last["generated_text"] == "Once upon" + TEXT
    assert "".join(event["token"]["text"] for event in received) == TEXT


async def test_hugging_face_routes_return_the_full_text(
    writing_store: Path,
) -> None:
    response = await ask(
        writing_store, ScriptedGenerator(), "/", {"inputs": "Once", "stream": True}
    )
    assert events_in(response.content)[-1]["generated_text"] == "Once" + TEXT


async def test_top_n_tokens_adds_top_tokens_to_events(writing_store: Path) -> None:
    first, *_ = await events(writing_store, {"top_n_tokens": 2})
    assert [one["id"] for one in first["top_tokens"]] == [7, 9]
    assert "top_tokens" not in (await events(writing_store, {}))[0]


async def test_held_back_text_occurs_once_in_the_full_text(writing_store: Path) -> None:
    held = [
        Chunk("", (Token(1, "a", -1.0),)),
        Chunk("ab", (Token(2, "b", -1.0),), ending(FinishReason.STOP, 2)),
    ]
    received = await events(writing_store, {"stop": ["ab"]}, chunks=held)
    assert [event["token"]["text"] for event in received] == ["a", "b"]
    assert received[-1]["generated_text"] == "ab"
    assert received[-1]["details"]["finish_reason"] == "stop_sequence"


async def test_end_without_token_is_an_empty_event(writing_store: Path) -> None:
    received = await events(writing_store, {}, chunks=[CHUNKS[0], Chunk("", (), ending(tokens=1))])
    assert [event["index"] for event in received] == [1, 2]
    assert (received[1]["token"]["text"], received[1]["token"]["special"]) == ("", True)
    assert received[1]["generated_text"] == " a"


async def test_stream_headers_omit_totals(writing_store: Path) -> None:
    response = await ask(writing_store, ScriptedGenerator(), STREAM, {"inputs": "Once upon"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-compute-type"] == "cpu-int4"
    assert response.headers["x-prompt-tokens"] == "2"
    assert b"[DONE]" not in response.content


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            EngineFailed("the engine failed"),
            {"error": "the engine failed", "error_type": "generation", "code": "engine_failed"},
        ),
        (
            InputTooLong("`prompt` is long", field="prompt"),
            {"error": "`inputs` is long", "error_type": "validation", "code": "input_too_long"},
        ),
        (
            KeyError("internals"),
            {
                "error": "unexpected failure; see the log of the server",
                "error_type": "incomplete_generation",
                "code": "internal",
            },
        ),
    ],
)
async def test_failure_within_a_stream_is_the_last_event(
    error: Exception, words: dict[str, str], writing_store: Path
) -> None:
    first, last = await events(writing_store, {}, chunks=[CHUNKS[0], error])
    assert first["token"]["text"] == " a"
    assert last == words


@pytest.mark.parametrize(
    ("error", "status"), [(Overloaded("Model is overloaded"), 429), (EngineFailed("no"), 424)]
)
async def test_failure_before_the_first_token_sets_the_status(
    error: ServeError, status: int, writing_store: Path
) -> None:
    generator = ScriptedGenerator(refusal=error)
    response = await ask(writing_store, generator, STREAM, {"inputs": "Once"})
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", [STREAM, "/"])
async def test_unstreamable_parameters_set_the_status(path: str, writing_store: Path) -> None:
    body = {"inputs": "Once", "stream": True, "parameters": {"decoder_input_details": True}}
    response = await ask(writing_store, ScriptedGenerator(), path, body)
    assert (response.status_code, response.json()["error_type"]) == (422, "validation")


async def test_client_disconnect_stops_generation(writing_store: Path) -> None:
    generator = ScriptedGenerator(chunks=CHUNKS[:1])  # then the generator hangs
    server = InProcess(writing_store, models=MODELS, generator=generator)
    async with server.application() as app:
        client = AsgiClient(app, STREAM, {"inputs": "Once"})
        await client.wait_for_text('"text":" a"')
        client.disconnect()
        await client.task
        assert generator.running == 0
    assert [record.status for record in server.recorder.records] == [499]


async def test_concurrent_streams_do_not_mix_tokens(writing_store: Path) -> None:
    generator = ScriptedGenerator(pause_s=0.001)
    server = InProcess(writing_store, models=MODELS, generator=generator)

    async def one(http: httpx.AsyncClient, prompt: str) -> str:
        body = {"inputs": prompt, "parameters": {"return_full_text": True}}
        response = await http.post(STREAM, json=body)
        text: str = events_in(response.content)[-1]["generated_text"]
        return text

    async with server.client() as http:
        texts = await asyncio.gather(*(one(http, prompt) for prompt in "abc"))
    assert texts == ["a" + TEXT, "b" + TEXT, "c" + TEXT]
