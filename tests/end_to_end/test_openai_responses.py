"""The Responses API with the client of openai, and with LangChain's."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from tests.end_to_end.test_generation_openai import TALLY, Tally
from tests.support.client_environment import run_client
from tests.support.ray_cluster import Cluster
from tests.support.served_models import EMBEDDER, FIXED_TEXT_MODEL, SAYS, WRITER

QUESTION = "What is a river?"
COUNT_ANIMALS: Any = {
    "type": "function",
    "name": "count_animals",
    "parameters": TALLY,
    "strict": True,
}


@pytest.fixture
def openai(cluster: Cluster) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0)


def test_response_has_the_text_and_its_usage(openai: OpenAI) -> None:
    response = openai.responses.create(
        model=FIXED_TEXT_MODEL, instructions="Be brief.", input=QUESTION, temperature=0
    )
    assert (response.output_text, response.status) == (SAYS, "completed")
    assert response.model == FIXED_TEXT_MODEL
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    counted = openai.responses.input_tokens.count(
        model=FIXED_TEXT_MODEL, instructions="Be brief.", input=QUESTION
    )
    assert counted.input_tokens == response.usage.input_tokens


def test_stream_ends_with_the_whole_response(openai: OpenAI) -> None:
    sent: Any = {"model": FIXED_TEXT_MODEL, "input": QUESTION, "temperature": 0}
    with openai.responses.stream(**sent) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == SAYS
    assert final.usage is not None
    assert final.usage.output_tokens > 0


def test_response_of_few_tokens_is_incomplete(openai: OpenAI) -> None:
    response = openai.responses.create(
        model=FIXED_TEXT_MODEL, input=QUESTION, temperature=0, max_output_tokens=1
    )
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_parse_returns_the_requested_type(openai: OpenAI) -> None:
    response = openai.responses.parse(
        model=WRITER, input=QUESTION, text_format=Tally, extra_body={"seed": 1}
    )
    assert isinstance(response.output_parsed, Tally)


def test_forced_call_is_answered_with_its_output(openai: OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    response = openai.responses.create(
        model=WRITER,
        input=items,
        tools=[COUNT_ANIMALS],
        tool_choice={"type": "function", "name": "count_animals"},
        extra_body={"seed": 2},
    )
    (call,) = response.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), TALLY)
    items += [
        call.model_dump(exclude_unset=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]
    answer = openai.responses.create(model=WRITER, input=items, max_output_tokens=5)
    assert answer.output[-1].type == "message"


async def test_asynchronous_client_streams_events(cluster: Cluster) -> None:
    base_url = f"{cluster.url}/models/{FIXED_TEXT_MODEL}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="unused") as client:
        stream = await client.responses.create(
            model="-", input=QUESTION, temperature=0, stream=True
        )
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == SAYS


def test_errors_have_their_exception_types(openai: OpenAI) -> None:
    create = openai.responses.create
    with pytest.raises(NotFoundError, match="nobody/nothing does not exist"):
        create(model="nobody/nothing", input=QUESTION)
    with pytest.raises(BadRequestError, match="generates no text"):
        create(model=EMBEDDER, input=QUESTION)
    with pytest.raises(NotFoundError, match="stores no responses"):
        openai.responses.retrieve("resp_1")
    with pytest.raises(BadRequestError, match="stores no responses") as stored:
        create(model=WRITER, input=QUESTION, previous_response_id="resp_1")
    assert stored.value.param == "previous_response_id"
    with pytest.raises(BadRequestError, match="tokens") as long:
        create(model=FIXED_TEXT_MODEL, input="word " * 2_000)
    assert (long.value.param, long.value.code) == ("input", "context_length_exceeded")


def test_langchain_reads_responses(cluster: Cluster) -> None:
    settings = {"model": FIXED_TEXT_MODEL, "temperature": 0, "use_responses_api": True}
    result = run_client("langchain_chat.py", f"{cluster.url}/v1", json.dumps(settings), QUESTION)
    assert [part["text"] for part in result["whole"]] == [SAYS]
    streamed = [part.get("text", "") for parts in result["streamed"] for part in parts]
    assert "".join(streamed) == SAYS
