"""Generation with the client of openai."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import pytest
from openai import (
    AsyncOpenAI,
    BadRequestError,
    NotFoundError,
    OpenAI,
)
from pydantic import BaseModel, Field

from tests.support.ray_cluster import Cluster
from tests.support.served_models import EMBEDDER, FIXED_TEXT_MODEL, SAYS, WRITER

USER: Any = {"role": "user", "content": "What is a river?"}
TALLY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "dog", "ant"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "name": {"type": "string", "maxLength": 8, "pattern": "^[a-z]*$"},
    },
    "required": ["animal", "count", "name"],
    "additionalProperties": False,
}


class Tally(BaseModel):
    """Response format. All fields are bounded, so that a model that generates noise finishes."""

    animal: Literal["cat", "dog", "ant"]
    count: int = Field(ge=0, le=999)


@pytest.fixture
def openai(cluster: Cluster) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0)


def test_chat_returns_a_message(openai: OpenAI) -> None:
    response = openai.chat.completions.create(
        model=FIXED_TEXT_MODEL, messages=[USER], temperature=0
    )
    (choice,) = response.choices
    assert (choice.message.content, choice.finish_reason) == (SAYS, "stop")
    assert response.usage is not None
    assert (
        response.usage.total_tokens
        == response.usage.prompt_tokens + response.usage.completion_tokens
    )
    assert response.model == FIXED_TEXT_MODEL


def test_chat_stream_ends_with_usage(openai: OpenAI) -> None:
    stream = openai.chat.completions.create(
        model=FIXED_TEXT_MODEL,
        messages=[USER],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *parts, last = stream
    assert "".join(part.choices[0].delta.content or "" for part in parts) == SAYS
    assert parts[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens > 0


def test_list_of_prompts_has_several_choices_each(openai: OpenAI) -> None:
    response = openai.completions.create(
        model=WRITER, prompt=["the rain", "an inn"], n=2, seed=3, max_tokens=6, logprobs=2
    )
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in response.choices}) == 4
    for choice in response.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens or ()) <= 6
        # Fewer are possible: partial UTF-8 bytes decode to the same text and share one key.
        assert all(1 <= len(top) <= 3 for top in choice.logprobs.top_logprobs or ())
    assert response.usage is not None
    assert response.usage.completion_tokens <= 4 * 6


def test_equal_seeds_give_equal_text_and_stream(openai: OpenAI) -> None:
    def text(**more: Any) -> str:
        response: Any = openai.completions.create(
            model=WRITER, prompt="the rain", seed=5, max_tokens=40, **more
        )
        return "".join(p.choices[0].text for p in response) if more else response.choices[0].text

    assert text() == text() == text(stream=True)


def test_several_choices_are_streamed(openai: OpenAI) -> None:
    stream = openai.chat.completions.create(
        model=WRITER, messages=[USER], n=3, seed=1, max_tokens=5, stream=True
    )
    ended = [p.choices[0].index for p in stream if p.choices[0].finish_reason is not None]
    assert sorted(ended) == [0, 1, 2]


def test_stop_string_ends_the_text_before_it(openai: OpenAI) -> None:
    response = openai.chat.completions.create(
        model=FIXED_TEXT_MODEL, messages=[USER], temperature=0, stop=["you"]
    )
    (choice,) = response.choices
    assert choice.message.content == SAYS.partition("you")[0]
    assert choice.finish_reason == "stop"


def test_chat_logprobs_are_returned_per_token(openai: OpenAI) -> None:
    response = openai.chat.completions.create(
        model=FIXED_TEXT_MODEL, messages=[USER], temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    tokens = logprobs.content or []
    assert "".join(token.token for token in tokens) == SAYS
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob <= 0


@pytest.mark.parametrize("seed", range(3))
def test_random_model_follows_a_json_schema(openai: OpenAI, seed: int) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "tally", "schema": TALLY}}
    response = openai.chat.completions.create(
        model=WRITER, messages=[USER], seed=seed, response_format=form
    )
    assert response.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(response.choices[0].message.content or ""), TALLY)


def test_parse_returns_the_requested_type(openai: OpenAI) -> None:
    response = openai.chat.completions.parse(
        model=WRITER, messages=[USER], seed=1, response_format=Tally
    )
    parsed = response.choices[0].message.parsed
    assert isinstance(parsed, Tally)
    assert 0 <= parsed.count <= 999


def test_required_tool_is_called(openai: OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "count_animals", "parameters": TALLY}}
    response = openai.chat.completions.create(
        model=WRITER,
        messages=[USER],
        seed=2,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "count_animals"}},
    )
    (choice,) = response.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "count_animals"
    jsonschema.validate(json.loads(call.function.arguments), TALLY)


@pytest.mark.parametrize("path", ["/v1", f"/models/{FIXED_TEXT_MODEL}/v1"])
async def test_asynchronous_client_is_supported(cluster: Cluster, path: str) -> None:
    async with AsyncOpenAI(base_url=cluster.url + path, api_key="unused") as client:
        stream = await client.chat.completions.create(
            model=FIXED_TEXT_MODEL, messages=[USER], temperature=0, stream=True
        )
        said = [part.choices[0].delta.content or "" async for part in stream]
    assert "".join(said) == SAYS


def test_request_selects_the_hardware(openai: OpenAI) -> None:
    wish = {"x-use-gpu": "true", "x-wait-for-model": "true"}
    create = openai.chat.completions.with_raw_response.create
    reply = create(
        model=FIXED_TEXT_MODEL, messages=[USER], temperature=0, extra_headers=wish, timeout=90
    )
    assert reply.headers["x-compute-type"] == "gpu-fp32"
    assert reply.parse().choices[0].message.content == SAYS
    usual = create(model=FIXED_TEXT_MODEL, messages=[USER], temperature=0)
    assert usual.headers["x-compute-type"] == "cpu-fp32"


def test_errors_have_their_exception_types(openai: OpenAI) -> None:
    create = openai.chat.completions.create
    with pytest.raises(NotFoundError, match="nobody/nothing does not exist"):
        create(model="nobody/nothing", messages=[USER])
    with pytest.raises(BadRequestError, match="generates no text"):
        create(model=EMBEDDER, messages=[USER])
    with pytest.raises(BadRequestError, match="temperature") as hot:
        create(model=WRITER, messages=[USER], temperature=3)
    assert hot.value.param == "temperature"
    with pytest.raises(BadRequestError, match="tokens") as long:
        create(model=FIXED_TEXT_MODEL, messages=[{**USER, "content": "word " * 2_000}])
    assert (long.value.param, long.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(BadRequestError, match="cannot be used") as odd:
        create(model=WRITER, messages=[USER], response_format={"type": "regex", "value": "("})  # type: ignore[call-overload]
    assert odd.value.param == "response_format"
    with pytest.raises(BadRequestError, match="best_of"):
        openai.completions.create(model=WRITER, prompt="a", best_of=2, stream=True)
