"""Tests of the OpenAI routes with a tiny decoder model instead of a fake generator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import orjson
import pytest

from deployments.artifacts.types import Device
from deployments.config import AppArgs, GeneratorSettings, ModelSettings
from deployments.records import StepRecord
from deployments.replicas.generator import GeneratorReplica
from tests.support.chat_harness import CHAT, COMPLETIONS, USER, events_in
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder, write_byte_tokenizer
from tests.support.fakes import ListRecorder
from tests.support.in_process import InProcess
from tests.support.local_clients import LocalGeneratorClient

FIXED_TEXT_MODEL, SAYS = "tiny/speaker", "Hi you!"
MODELS = (FIXED_TEXT_MODEL, DECODER)
ASKED = {"model": FIXED_TEXT_MODEL, "messages": [USER], "temperature": 0}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("speaking")
    seal_tiny_decoder(store)
    seal_tiny_decoder(store, FIXED_TEXT_MODEL, says=SAYS)
    return store


@asynccontextmanager
async def client(store: Path, models: Sequence[str] = MODELS) -> AsyncIterator[httpx.AsyncClient]:
    args = AppArgs(
        store=store,
        models=tuple(ModelSettings(id=one) for one in models),
        encoders={},
        generators={Device.CPU: GeneratorSettings(kv_slots=2, max_context_tokens=200)},
    )
    steps: ListRecorder[StepRecord] = ListRecorder()
    replica = GeneratorReplica(args, Device.CPU, steps)
    replica.start()
    server = InProcess(store, models=models, generator=LocalGeneratorClient(replica))
    try:
        async with server.client() as http:
            yield http
    finally:
        await replica.close()


async def ask_one_of(store: Path, models: Sequence[str], model: str, **more: Any) -> dict[str, Any]:
    """Return the answer of `model` to a short chat, with further fields of the request."""
    body = {"model": model, "messages": [USER], "temperature": 0, **more}
    async with client(store, models) as http:
        response = await http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    parsed: dict[str, Any] = response.json()
    return parsed


TOOL = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize("stream", [False, True])
async def test_response_warns_if_the_chat_template_ignores_tools(store: Path, stream: bool) -> None:
    body = {**ASKED, "stream": stream}
    async with client(store) as http:
        plain = await http.post(CHAT, json=body)
        with_tools = await http.post(CHAT, json={**body, "tools": [TOOL]})
    assert "x-hf-warning" not in plain.headers
    assert with_tools.headers["x-hf-warning"].startswith("tools-ignored; ")


async def test_chat_stream_equals_the_whole_response(store: Path) -> None:
    async with client(store) as http:
        full = (await http.post(CHAT, json=ASKED)).json()
        stream = await http.post(CHAT, json={**ASKED, "stream": True})
    (choice,) = full["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (SAYS, "stop")
    *events, done = events_in(stream.content)
    assert done == "[DONE]"
    options_sent = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(options_sent) == SAYS


async def test_max_tokens_ends_the_text_with_logprobs(store: Path) -> None:
    body = {"model": DECODER, "prompt": "the rain", "max_tokens": 5, "logprobs": 2, "echo": True}
    async with client(store) as http:
        result = (await http.post(COMPLETIONS, json={**body, "seed": 3})).json()
        again = (await http.post(COMPLETIONS, json={**body, "seed": 3})).json()
    (choice,) = result["choices"]
    assert choice == again["choices"][0], "the seed decides"
    assert choice["text"].startswith("the rain")
    assert choice["finish_reason"] == "length"
    read, written = result["usage"]["prompt_tokens"], result["usage"]["completion_tokens"]
    assert written == 5
    columns = choice["logprobs"]
    assert {len(column) for column in columns.values()} == {read + written}
    assert columns["token_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in columns["token_logprobs"][1:])
    assert "".join(columns["tokens"][:read]) == "the rain"


async def test_echo_of_token_ids_is_their_text_with_alternatives(
    store: Path, tmp_path: Path
) -> None:
    text = "Zażółć 日本"
    ids = write_byte_tokenizer(tmp_path / "tokenizer.json").encode(text).ids
    body = {"model": DECODER, "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 3}
    async with client(store) as http:
        (choice,) = (await http.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["text"] == text
    first, *tops = choice["logprobs"]["top_logprobs"]
    assert first is None
    logprobs = choice["logprobs"]["token_logprobs"][1:]
    best = [max(top.values()) for top in tops]
    assert any(one < most for one, most in zip(logprobs, best, strict=True)), "not all are likely"


async def test_choices_have_different_seeds(store: Path) -> None:
    body = {"model": DECODER, "prompt": ["a", "b"], "n": 2, "seed": 3, "max_tokens": 8}
    async with client(store) as http:
        result = (await http.post(COMPLETIONS, json=body)).json()
    texts = [choice["text"] for choice in result["choices"]]
    assert len(set(texts)) == 4


async def test_required_tool_call_is_made_by_a_random_model(store: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/Unit"}},
        "required": ["unit"],
        "additionalProperties": False,
        "$defs": {"Unit": {"enum": ["celsius", "kelvin"]}},
    }
    tool = {"type": "function", "function": {"name": "measure", "parameters": schema}}
    body = {"model": DECODER, "messages": [USER], "tools": [tool], "tool_choice": "required"}
    async with client(store) as http:
        result = (await http.post(CHAT, json={**body, "seed": 1})).json()
    (choice,) = result["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "measure"
    jsonschema.validate(orjson.loads(call["function"]["arguments"]), schema)


async def test_call_of_a_random_model_may_be_cut_anywhere(store: Path) -> None:
    # The tokens of this model are bytes. The call is `{"name": "measure", "arguments": {}}`, with
    # or without each of its spaces.
    tool = {"type": "function", "function": {"name": "measure"}}
    body = {"model": DECODER, "messages": [USER], "tools": [tool], "tool_choice": "required"}
    arguments = []
    async with client(store) as http:
        for max_tokens in (5, 25, 33, 60):
            sent = {**body, "seed": 1, "max_tokens": max_tokens}
            (choice,) = (await http.post(CHAT, json=sent)).json()["choices"]
            assert choice["message"]["content"] is None
            assert choice["finish_reason"] == ("tool_calls" if max_tokens == 60 else "length")
            for call in choice["message"].get("tool_calls", []):
                assert call["function"]["name"] == "measure"
                arguments.append(call["function"]["arguments"].replace(" ", ""))
    assert len(arguments) == 3
    assert arguments[0] == ""
    assert arguments[-1] == "{}"


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (CHAT, {"messages": [{**USER, "content": "x" * 900}]}, "messages"),
        (COMPLETIONS, {"prompt": "x" * 900}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "x" * 900]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [[1], [10**6]]}, "prompt[1]"),
        (
            COMPLETIONS,
            {"prompt": "a", "response_format": {"type": "regex", "value": "("}},
            "response_format",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_generator_errors_name_the_field_of_the_body(
    path: str, more: dict[str, Any], param: str, stream: bool, store: Path
) -> None:
    async with client(store) as http:
        response = await http.post(path, json={"model": DECODER, **more, "stream": stream})
    error = response.json()["error"]
    assert response.status_code in (400, 422)
    assert error["param"] == param
    assert f"`{param}`" in error["message"]
