"""Whole answers of `/v1/messages`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from deployments.messages import FinishReason
from tests.support.decoder_artifacts import DECODER
from tests.support.generators import COMPUTE_TYPE
from tests.support.messages_harness import (
    CALL,
    MESSAGES,
    MESSAGES_BODY,
    WEATHER,
    script_messages,
)

TOOLS = {**MESSAGES_BODY, "tools": [WEATHER]}


@pytest.mark.parametrize("path", [MESSAGES, f"/models/{DECODER}/v1/messages"])
async def test_message_has_text_usage_and_the_reason_of_its_end(
    path: str, writing_store: Path
) -> None:
    response = await script_messages(writing_store).post(path, MESSAGES_BODY)
    assert response.headers["x-compute-type"] == COMPUTE_TYPE
    body = response.json()
    assert re.fullmatch(r"msg_[0-9a-f]{32}", body.pop("id"))
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": DECODER,
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,  # one more is cached
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 3,
        },
    }


async def test_answer_without_text_has_no_blocks(writing_store: Path) -> None:
    harness = script_messages(writing_store, "", reason=FinishReason.LENGTH)
    body = (await harness.post(MESSAGES, MESSAGES_BODY)).json()
    assert body["content"] == []
    assert body["stop_reason"] == "max_tokens"


async def test_stop_sequence_that_ended_the_answer_is_named(writing_store: Path) -> None:
    harness = script_messages(writing_store, reason=FinishReason.STOP, stop="\n\n")
    body = {**MESSAGES_BODY, "stop_sequences": ["END", "\n\n"]}
    answer = (await harness.post(MESSAGES, body)).json()
    assert harness.call.options.stop == ("END", "\n\n")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "\n\n")


async def test_reasoning_is_a_block_before_the_text(writing_store: Path) -> None:
    harness = script_messages(writing_store, reasoning=("\n", "Let me", " see.\n"))
    answer = (await harness.post(MESSAGES, MESSAGES_BODY)).json()
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        {"type": "text", "text": "Hello"},
    ]
    assert answer["usage"]["output_tokens"] == 6
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


async def test_calls_are_blocks_after_the_text(writing_store: Path) -> None:
    text = f"Let me see.\n<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    answer = (await script_messages(writing_store, text).post(MESSAGES, TOOLS)).json()
    first, *calls = answer["content"]
    assert first == {"type": "text", "text": "Let me see."}
    for call in calls:
        # Chat templates of Mistral require nine letters or digits.
        assert re.fullmatch("[0-9a-f]{9}", call.pop("id"))
        assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}}
    assert len(calls) == 2
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ({"type": "auto"}, 2),
        ({"type": "auto", "disable_parallel_tool_use": True}, 1),
        ({"type": "none"}, 0),
    ],
)
async def test_tool_choice_limits_the_calls(
    choice: dict[str, Any], calls: int, writing_store: Path
) -> None:
    harness = script_messages(writing_store, f"[{CALL}, {CALL}]")
    answer = (await harness.post(MESSAGES, {**TOOLS, "tool_choice": choice})).json()
    assert [block["type"] for block in answer["content"]] == (["tool_use"] * calls or ["text"])


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_call_may_be_forced(choice: dict[str, Any], writing_store: Path) -> None:
    harness = script_messages(writing_store, CALL)
    answer = (await harness.post(MESSAGES, {**TOOLS, "tool_choice": choice})).json()
    assert harness.call.options.grammar is not None
    assert [block["type"] for block in answer["content"]] == ["tool_use"]


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        pytest.param(CALL[:-1], [{"city": "Rome"}], id="after the input"),
        pytest.param(CALL[:-4], [{}], id="within the input"),
        pytest.param(CALL[:20], [{}], id="after the name"),
        pytest.param(CALL[:-8] + "[" * 100_000, [{}], id="too deep"),
        pytest.param(CALL[:12], [], id="within the name"),
    ],
)
async def test_call_that_is_cut_short_has_an_empty_input(
    text: str, inputs: list[dict[str, str]], writing_store: Path
) -> None:
    harness = script_messages(writing_store, text, reason=FinishReason.LENGTH)
    body = {**TOOLS, "tool_choice": {"type": "any"}}
    answer = (await harness.post(MESSAGES, body)).json()
    assert [block["type"] for block in answer["content"]] == ["tool_use"] * len(inputs)
    assert [block["input"] for block in answer["content"]] == inputs
    assert answer["stop_reason"] == "max_tokens"


async def test_call_before_the_one_that_is_cut_keeps_its_input(writing_store: Path) -> None:
    text = f"I look.<tool_call>{CALL}</tool_call><tool_call>{CALL[:-4]}"
    harness = script_messages(writing_store, text, reason=FinishReason.LENGTH)
    answer = (await harness.post(MESSAGES, TOOLS)).json()
    assert answer["content"][0] == {"type": "text", "text": "I look."}
    assert [block["input"] for block in answer["content"][1:]] == [{"city": "Rome"}, {}]
    assert answer["stop_reason"] == "max_tokens"


async def test_call_that_a_stop_sequence_cuts_is_not_to_be_run(writing_store: Path) -> None:
    harness = script_messages(writing_store, CALL[:-4], reason=FinishReason.STOP, stop="e")
    body = {**TOOLS, "tool_choice": {"type": "any"}, "stop_sequences": ["e"]}
    answer = (await harness.post(MESSAGES, body)).json()
    assert [block["input"] for block in answer["content"]] == [{}]
    assert answer["stop_reason"] == "stop_sequence"


async def test_input_of_a_call_may_have_large_integers(writing_store: Path) -> None:
    call = CALL.replace('"Rome"', str(2**70))
    response = await script_messages(writing_store, call).post(MESSAGES, TOOLS)
    assert f'"input":{{"city": {2**70}}}' in response.text


async def test_request_may_have_more_tools_than_openai_allows(writing_store: Path) -> None:
    tools = [{**WEATHER, "name": f"weather_{number}"} for number in range(1_024)]
    harness = script_messages(writing_store, CALL.replace("weather", "weather_1023"))
    answer = (await harness.post(MESSAGES, {**MESSAGES_BODY, "tools": tools})).json()
    assert answer["content"][0]["name"] == "weather_1023"
