"""Requests of `/v1/messages` as the generator receives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.messages import Chat, GenerationCall
from tests.support.chat_harness import USER
from tests.support.messages_harness import (
    COUNT,
    MESSAGES,
    MESSAGES_BODY,
    WEATHER,
    script_messages,
)

USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sunny"}
CALLS = [
    {
        "id": "toolu_1",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Rome"}},
    }
]


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}


async def send(store: Path, **changes: Any) -> GenerationCall:
    """Send a body with `changes`. Return the call that the generator receives."""
    harness = script_messages(store)
    response = await harness.post(MESSAGES, {**MESSAGES_BODY, **changes})
    assert response.status_code == 200, response.text
    return harness.call


async def convert(store: Path, *messages: dict[str, Any], **changes: Any) -> tuple[Any, ...]:
    """Return the messages that the chat template receives."""
    prompt = (await send(store, messages=messages, **changes)).prompt
    assert isinstance(prompt, Chat)
    return prompt.messages


async def test_sampling_and_lengths_are_passed_on(writing_store: Path) -> None:
    options = (
        await send(
            writing_store,
            max_tokens=7,
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            stop_sequences=["END"],
            metadata={"user_id": "u"},
            service_tier="auto",
        )
    ).options
    assert (options.max_new_tokens, options.stop) == (7, ("END",))
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.25)


@pytest.mark.parametrize("system", ["Be brief.\nBe kind.", [text("Be brief."), text("Be kind.")]])
async def test_system_prompt_is_the_first_message(system: Any, writing_store: Path) -> None:
    assert await convert(writing_store, USER, system=system) == (
        {"role": "system", "content": "Be brief.\nBe kind."},
        USER,
    )


@pytest.mark.parametrize("system", ["", [], None])
async def test_empty_system_prompt_is_no_message(system: Any, writing_store: Path) -> None:
    assert await convert(writing_store, USER, system=system) == (USER,)


async def test_tool_calls_and_results_are_messages_of_the_chat(writing_store: Path) -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "any"}
    redacted = {"type": "redacted_thinking", "data": "..."}
    blocks = {**RESULT, "content": [text("Rain"), text("and wind")], "is_error": False}
    failed = {**RESULT, "content": "No such city", "is_error": True}
    empty = {"type": "tool_result", "tool_use_id": "toolu_1"}
    assert await convert(
        writing_store,
        USER,
        {"role": "assistant", "content": [redacted, thinking, text("Let me see."), USE]},
        {"role": "user", "content": [RESULT, blocks, failed, empty, text("And now?")]},
    ) == (
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": CALLS,
        },
        {"role": "tool", "content": "Sunny", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "Rain\nand wind", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "Error: No such city", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "And now?"},
    )


async def test_consecutive_messages_of_one_role_are_joined(writing_store: Path) -> None:
    assert await convert(
        writing_store,
        {"role": "user", "content": "One"},
        {"role": "user", "content": [text("two")]},
        {"role": "assistant", "content": "Three"},
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [RESULT]},
        {"role": "system", "content": "Be brief."},
        USER,
    ) == (
        {"role": "user", "content": "One\ntwo"},
        {"role": "assistant", "content": "Three", "tool_calls": CALLS},
        {"role": "tool", "content": "Sunny", "tool_call_id": "toolu_1"},
        {"role": "system", "content": "Be brief."},
        USER,
    )


async def test_message_without_blocks_keeps_its_place(writing_store: Path) -> None:
    assert await convert(
        writing_store,
        USER,
        {"role": "assistant", "content": []},
        {"role": "user", "content": []},
    ) == (USER, {"role": "assistant", "content": ""}, {"role": "user", "content": ""})


async def test_template_receives_tools_in_the_form_of_chats(writing_store: Path) -> None:
    clock = {"type": "custom", "name": "clock", "input_schema": {"type": "object"}}
    prompt = (await send(writing_store, tools=[WEATHER, clock])).prompt
    assert isinstance(prompt, Chat)
    assert prompt.tools == (
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Of a city",
                "parameters": WEATHER["input_schema"],
            },
        },
        {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}},
    )


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        (None, ()),
        ({"type": "adaptive"}, ()),
        ({"type": "enabled", "budget_tokens": 1_024}, (("enable_thinking", True),)),
        ({"type": "disabled"}, (("enable_thinking", False),)),
    ],
)
async def test_thinking_is_a_variable_of_the_template(
    thinking: Any, variables: tuple[Any, ...], writing_store: Path
) -> None:
    prompt = (await send(writing_store, thinking=thinking)).prompt
    assert isinstance(prompt, Chat)
    assert prompt.variables == variables


async def test_output_config_sets_a_grammar_and_the_effort(writing_store: Path) -> None:
    output = {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    call = await send(writing_store, output_config=output)
    assert call.options.grammar == ("json_schema", '{"type":"object"}')
    assert isinstance(call.prompt, Chat)
    assert call.prompt.variables == (("reasoning_effort", "low"),)


async def test_tokens_of_the_same_prompt_are_counted(writing_store: Path) -> None:
    harness = script_messages(writing_store)
    fields = {
        "system": "Be brief.",
        "tools": [WEATHER],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        # A conversation of which the answer is known already.
        "messages": [USER, {"role": "assistant", "content": "A river."}],
    }
    response = await harness.post(COUNT, fields)
    assert response.json() == {"input_tokens": 8}, response.text
    (record,) = harness.in_process.recorder.records
    assert (record.task, record.status, record.timings.tokens) == ("tokenize", 200, 0)
    counted = harness.call.prompt
    await harness.post(
        MESSAGES, {**MESSAGES_BODY, **fields, "messages": [*fields["messages"], USER]}
    )
    prompt = harness.call.prompt
    assert isinstance(counted, Chat)
    assert isinstance(prompt, Chat)
    assert counted == prompt._replace(messages=prompt.messages[:-1])
