"""Tests of the Responses API with the unmodified `openai` client and an in-process server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from deployments.errors import EngineFailed
from deployments.messages import Chat, FinishReason, GenerationCall
from tests.support.chat_harness import ChatHarness
from tests.support.decoder_artifacts import DECODER
from tests.support.generators import ScriptedReply
from tests.support.responses_harness import CALL, WEATHER, script_responses
from tests.unit.deployments.ingress.apis.openai.test_openai_package import open_client

QUESTION: Any = {"model": DECODER, "input": "What is a river?"}
TOOLS: Any = [WEATHER]


async def test_openai_client_creates_and_streams_responses(writing_store: Path) -> None:
    async with open_client(script_responses(writing_store, reasoning=("Hm",))) as client:
        whole = await client.responses.create(**QUESTION)
        events = [event async for event in await client.responses.create(**QUESTION, stream=True)]
        async with client.responses.stream(**QUESTION) as stream:
            collected = [event async for event in stream]
            final = await stream.get_final_response()
    assert whole.output_text == final.output_text == "Hello"
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert whole.usage == final.usage
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert texts == ["Hel", "lo"]
    snapshots = [e.snapshot for e in collected if e.type == "response.output_text.delta"]
    assert snapshots == ["Hel", "Hello"]


class Town(BaseModel):
    name: str


async def test_openai_client_parses_responses(writing_store: Path) -> None:
    harness = script_responses(writing_store, '{"name": "Rome"}')
    async with open_client(harness) as client:
        parsed = await client.responses.parse(**QUESTION, text_format=Town)
        async with client.responses.stream(**QUESTION, text_format=Town) as stream:
            streamed = await stream.get_final_response()
    assert parsed.output_parsed == streamed.output_parsed == Town(name="Rome")
    assert harness.call.options.grammar is not None
    assert harness.call.options.grammar.kind == "json_schema"


def answer_with_tool(call: GenerationCall) -> ScriptedReply:
    """Call the tool, and answer once its output is there."""
    assert isinstance(call.prompt, Chat)
    if call.prompt.messages[-1]["role"] == "tool":
        return ScriptedReply((f"It is {call.prompt.messages[-1]['content']}.",))
    return ScriptedReply(tuple(CALL), reasoning=("I", " look."))


@pytest.mark.parametrize("streams", [False, True])
async def test_openai_client_runs_a_loop_with_a_tool(streams: bool, writing_store: Path) -> None:
    """The loop of an agent: items of responses are sent again, with outputs of the tool."""
    harness = ChatHarness(writing_store, answer_with_tool)
    items: Any = [{"role": "user", "content": "How is Rome?"}]
    async with open_client(harness) as client:
        for _ in range(2):
            sent: Any = {"model": DECODER, "input": items, "tools": TOOLS, "store": False}
            if streams:
                async with client.responses.stream(**sent) as stream:
                    response: Any = await stream.get_final_response()
            else:
                response = await client.responses.create(**sent)
            items += [item.model_dump(exclude_unset=True) for item in response.output]
            items += [
                {
                    "type": "function_call_output",
                    "call_id": item.call_id,
                    "output": "sunny in " + json.loads(item.arguments)["city"],
                }
                for item in response.output
                if item.type == "function_call"
            ]
    assert response.output_text == "It is sunny in Rome."
    assert isinstance(harness.call.prompt, Chat)
    question, call, output = harness.call.prompt.messages
    assert call["reasoning_content"] == "I look."
    assert call["tool_calls"][0]["id"] == output["tool_call_id"]
    assert question["content"] == "How is Rome?"


class Weather(BaseModel):
    city: str


async def test_openai_client_parses_the_arguments_of_calls(writing_store: Path) -> None:
    text = '{"name": "Weather", "arguments": {"city": "Rome"}}'
    tools: Any = [openai.pydantic_function_tool(Weather)]
    async with open_client(script_responses(writing_store, text)) as client:
        parsed: Any = await client.responses.parse(**QUESTION, tools=tools, tool_choice="required")
    (call,) = parsed.output
    assert call.parsed_arguments == Weather(city="Rome")


async def test_openai_client_tells_why_a_response_is_incomplete(writing_store: Path) -> None:
    harness = script_responses(writing_store, reason=FinishReason.LENGTH)
    async with open_client(harness) as client:
        whole = await client.responses.create(**QUESTION)
        events = [event async for event in await client.responses.create(**QUESTION, stream=True)]
    last = events[-1]
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"


async def test_openai_client_raises_for_errors_of_responses(writing_store: Path) -> None:
    harness = script_responses(writing_store, breaks=EngineFailed("broken"))
    async with open_client(harness) as client:
        with pytest.raises(openai.BadRequestError, match="this server stores no responses") as bad:
            await client.responses.create(**QUESTION, previous_response_id="resp_1")
        assert bad.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError, match="this server stores no responses"):
            await client.responses.retrieve("resp_1")
        with pytest.raises(openai.InternalServerError, match="broken"):
            await client.responses.create(**QUESTION)
        stream = await client.responses.create(**QUESTION, stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == "broken"


async def test_openai_client_counts_tokens(writing_store: Path) -> None:
    async with open_client(script_responses(writing_store)) as client:
        counted = await client.responses.input_tokens.count(**QUESTION)
        whole = await client.responses.create(**QUESTION)
    assert whole.usage is not None
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == whole.usage.input_tokens
