"""Streams: an event for each token, the last one with the whole text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.errors import EngineFailed, InputTooLong, Overloaded, ServeError
from deployments.generation.messages import Chunk, FinishReason, Token
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
    reply = await ask(writing_store, ScriptedGenerator(**generator), STREAM, body)
    assert reply.status_code == 200
    return events_in(reply.content)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (STREAM, {}),
        (f"/models/{DECODER}{STREAM}", {}),
        (f"/models/{DECODER}", {"stream": True}),
        ("/", {"stream": True}),
    ],
)
async def test_there_is_an_event_for_each_token(
    path: str, more: dict[str, Any], writing_store: Path
) -> None:
    generator = ScriptedGenerator()
    body = {"inputs": "Once", "parameters": {"return_full_text": False}, **more}
    reply = await ask(writing_store, generator, path, body)
    told = events_in(reply.content)
    assert [event["index"] for event in told] == [1, 2, 3, 4]
    assert [event["token"]["text"] for event in told] == [" a", " ti", "me", ""]
    assert told[0] == {
        "index": 1,
        "token": {"id": 7, "text": " a", "logprob": -0.25, "special": False},
        "generated_text": None,
        "details": None,
    }
    assert [event["generated_text"] for event in told] == [None, None, None, TEXT]
    assert told[3]["token"] == {"id": 2, "text": "", "logprob": -0.125, "special": True}
    assert generator.running == 0


async def test_the_last_event_tells_how_it_ended(writing_store: Path) -> None:
    *others, last = await events(writing_store, {"details": True, "seed": 3, "do_sample": True})
    assert [event["details"] for event in others] == [None] * 3
    assert last["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 4,
        "input_length": 2,
        "seed": 3,
    }


async def test_the_whole_text_may_have_its_prompt_the_tokens_never(writing_store: Path) -> None:
    *_, last = told = await events(writing_store, {"return_full_text": True})
    assert last["generated_text"] == "Once upon" + TEXT
    assert "".join(event["token"]["text"] for event in told) == TEXT


async def test_a_body_behind_the_hugging_face_routes_gets_the_prompt_back(
    writing_store: Path,
) -> None:
    reply = await ask(writing_store, ScriptedGenerator(), "/", {"inputs": "Once", "stream": True})
    assert events_in(reply.content)[-1]["generated_text"] == "Once" + TEXT


async def test_what_might_have_come_is_told_where_that_is_asked(writing_store: Path) -> None:
    first, *_ = await events(writing_store, {"top_n_tokens": 2})
    assert [one["id"] for one in first["top_tokens"]] == [7, 9]
    assert "top_tokens" not in (await events(writing_store, {}))[0]


async def test_text_that_was_held_back_is_in_the_whole_text_once(writing_store: Path) -> None:
    held = [
        Chunk("", (Token(1, "a", -1.0),)),
        Chunk("ab", (Token(2, "b", -1.0),), ending(FinishReason.STOP, 2)),
    ]
    told = await events(writing_store, {"stop": ["ab"]}, chunks=held)
    assert [event["token"]["text"] for event in told] == ["a", "b"]
    assert told[-1]["generated_text"] == "ab"
    assert told[-1]["details"]["finish_reason"] == "stop_sequence"


async def test_an_end_without_a_token_is_an_event_that_adds_nothing(writing_store: Path) -> None:
    told = await events(writing_store, {}, chunks=[CHUNKS[0], Chunk("", (), ending(tokens=1))])
    assert [event["index"] for event in told] == [1, 2]
    assert (told[1]["token"]["text"], told[1]["token"]["special"]) == ("", True)
    assert told[1]["generated_text"] == " a"


async def test_the_headers_are_those_of_a_stream(writing_store: Path) -> None:
    reply = await ask(writing_store, ScriptedGenerator(), STREAM, {"inputs": "Once upon"})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["x-compute-type"] == "cpu-int4"
    assert reply.headers["x-prompt-tokens"] == "2"
    assert b"[DONE]" not in reply.content


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
                "error": "unexpected failure; the server's log has the details",
                "error_type": "incomplete_generation",
                "code": "internal",
            },
        ),
    ],
)
async def test_a_failure_on_the_way_is_the_last_event(
    error: Exception, words: dict[str, str], writing_store: Path
) -> None:
    first, last = await events(writing_store, {}, chunks=[CHUNKS[0], error])
    assert first["token"]["text"] == " a"
    assert last == words


@pytest.mark.parametrize(
    ("error", "status"), [(Overloaded("Model is overloaded"), 429), (EngineFailed("no"), 424)]
)
async def test_a_failure_before_the_first_token_has_its_status(
    error: ServeError, status: int, writing_store: Path
) -> None:
    generator = ScriptedGenerator(refusal=error)
    reply = await ask(writing_store, generator, STREAM, {"inputs": "Once"})
    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", [STREAM, "/"])
async def test_parameters_that_do_not_go_with_a_stream_have_a_status_too(
    path: str, writing_store: Path
) -> None:
    body = {"inputs": "Once", "stream": True, "parameters": {"decoder_input_details": True}}
    reply = await ask(writing_store, ScriptedGenerator(), path, body)
    assert (reply.status_code, reply.json()["error_type"]) == (422, "validation")


async def test_a_client_that_leaves_frees_the_generator(writing_store: Path) -> None:
    generator = ScriptedGenerator(chunks=CHUNKS[:1])  # and then it hangs
    world = InProcess(writing_store, models=MODELS, generator=generator)
    async with world.application() as app:
        visitor = AsgiClient(app, STREAM, {"inputs": "Once"})
        await visitor.sees('"text":" a"')
        visitor.leave()
        await visitor.visit
        assert generator.running == 0
    assert [record.status for record in world.recorder.records] == [499]


async def test_streams_side_by_side_keep_their_words_apart(writing_store: Path) -> None:
    generator = ScriptedGenerator(pause_s=0.001)
    world = InProcess(writing_store, models=MODELS, generator=generator)

    async def one(http: httpx.AsyncClient, prompt: str) -> str:
        body = {"inputs": prompt, "parameters": {"return_full_text": True}}
        reply = await http.post(STREAM, json=body)
        text: str = events_in(reply.content)[-1]["generated_text"]
        return text

    async with world.client() as http:
        texts = await asyncio.gather(*(one(http, prompt) for prompt in "abc"))
    assert texts == ["a" + TEXT, "b" + TEXT, "c" + TEXT]
