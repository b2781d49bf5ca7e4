"""Bodies of the Responses API: the chat that the model reads, and what is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from deployments.config import IngressUserConfig, LimitSettings
from deployments.messages import Chat
from tests.support.chat_harness import ChatHarness
from tests.support.responses_harness import (
    QUESTION,
    RESPONSES,
    WEATHER,
    respond,
    script_responses,
)

USER = {"role": "user", "content": "What is a river?"}
OUTPUT_TEXT = {"type": "output_text", "text": "Water.", "annotations": [], "logprobs": []}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "status": "completed",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
    "encrypted_content": None,
}
MESSAGE = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "content": [OUTPUT_TEXT],
}


def function_call(call_id: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call_id}",
        "status": "completed",
        "call_id": call_id,
        "name": "weather",
        "arguments": '{"city": "Rome"}',
    }


def function_output(call_id: str, output: Any = "Sunny") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def chat_call(call_id: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    return {"id": call_id, "type": "function", "function": function}


def chat_output(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "Sunny"}


async def read_chat(store: Path, body: dict[str, Any]) -> Chat:
    """Return the chat that the generator receives."""
    harness = script_responses(store)
    await respond(harness, body)
    assert isinstance(harness.call.prompt, Chat)
    return harness.call.prompt


@pytest.mark.parametrize(
    "sent",
    [
        "What is a river?",
        [USER],
        [{**USER, "type": "message"}],
        [{**USER, "content": [{"type": "input_text", "text": USER["content"]}]}],
    ],
)
async def test_forms_of_a_question_are_equal(sent: Any, writing_store: Path) -> None:
    assert (await read_chat(writing_store, {"input": sent})).messages == (USER,)


async def test_parts_of_a_message_are_joined_by_line_breaks(writing_store: Path) -> None:
    parts = [{"type": "input_text", "text": text} for text in ("Summarize.", "def f(): pass")]
    message = {"type": "message", "role": "user", "content": parts}
    prompt = await read_chat(writing_store, {"input": [message]})
    assert prompt.messages == ({"role": "user", "content": "Summarize.\ndef f(): pass"},)


async def test_instructions_come_first(writing_store: Path) -> None:
    sent = [{"role": "developer", "content": "In French."}, USER]
    chat = await read_chat(writing_store, {"instructions": "Be brief.", "input": sent})
    assert chat.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "In French."},
        USER,
    )


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (
            [REASONING, MESSAGE],
            [{"role": "assistant", "content": "Water.", "reasoning_content": "Hm."}],
        ),
        (
            [REASONING, MESSAGE, function_call("a"), function_call("b")],
            [
                {
                    "role": "assistant",
                    "content": "Water.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [chat_call("a"), chat_call("b")],
                },
            ],
        ),
        (
            [function_call("a"), function_output("a"), function_call("b"), function_output("b")],
            [
                {"role": "assistant", "content": "", "tool_calls": [chat_call("a")]},
                chat_output("a"),
                {"role": "assistant", "content": "", "tool_calls": [chat_call("b")]},
                chat_output("b"),
            ],
        ),
        (
            [MESSAGE, REASONING, function_call("a")],
            [
                {"role": "assistant", "content": "Water."},
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "Hm.",
                    "tool_calls": [chat_call("a")],
                },
            ],
        ),
        (
            [function_call("a"), MESSAGE],
            [
                {"role": "assistant", "content": "", "tool_calls": [chat_call("a")]},
                {"role": "assistant", "content": "Water."},
            ],
        ),
        (
            [{"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}],
            [{"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}],
        ),
        (
            [{**REASONING, "content": None, "summary": [{"type": "summary_text", "text": "Hm."}]}],
            [{"role": "assistant", "content": "", "reasoning_content": "Hm."}],
        ),
        ([{**REASONING, "content": None, "encrypted_content": "AAAA"}], []),
        (
            [REASONING, REASONING, MESSAGE],
            [{"role": "assistant", "content": "Water.", "reasoning_content": "Hm.\nHm."}],
        ),
        (
            [function_output("a", [{"type": "input_text", "text": one} for one in ("12", "34")])],
            [{**chat_output("a"), "content": "12\n34"}],
        ),
        (
            [{**MESSAGE, "content": []}, function_call("a"), function_output("a", [])],
            [
                {"role": "assistant", "content": "", "tool_calls": [chat_call("a")]},
                {**chat_output("a"), "content": ""},
            ],
        ),
        (
            [{**MESSAGE, "content": [{"type": "refusal", "refusal": "No."}]}],
            [{"role": "assistant", "content": "No."}],
        ),
        (
            [function_call("a"), function_output("a", [{"type": "input_text", "text": "Sunny"}])],
            [
                {"role": "assistant", "content": "", "tool_calls": [chat_call("a")]},
                chat_output("a"),
            ],
        ),
    ],
)
async def test_items_of_a_turn_are_one_message(
    items: list[Any], messages: list[Any], writing_store: Path
) -> None:
    chat = await read_chat(writing_store, {"input": [USER, *items, USER]})
    assert chat.messages == (USER, *messages, USER)


async def test_tools_are_those_of_a_chat(writing_store: Path) -> None:
    chat = await read_chat(writing_store, {**QUESTION, "tools": [WEATHER]})
    function = {key: value for key, value in WEATHER.items() if key != "type"}
    assert chat.tools == ({"type": "function", "function": function},)
    hidden = await read_chat(writing_store, {**QUESTION, "tools": [WEATHER], "tool_choice": "none"})
    assert hidden.tools == ()


async def test_null_fields_of_a_tool_are_left_out(writing_store: Path) -> None:
    parameters = {"type": "object", "properties": {"zone": {"default": None}}}
    tools = [
        {"type": "function", "name": "clock", "parameters": None, "strict": None},
        {"type": "function", "name": "clocks", "parameters": parameters, "strict": False},
    ]
    chat = await read_chat(writing_store, {**QUESTION, "tools": tools})
    one, other = (tool["function"] for tool in chat.tools)
    assert one == {"name": "clock"}
    assert other == {"name": "clocks", "parameters": parameters, "strict": False}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_forced_call_has_a_grammar(choice: Any, writing_store: Path) -> None:
    harness = script_responses(writing_store, '{"name": "weather", "arguments": {}}')
    await respond(harness, {**QUESTION, "tools": [WEATHER], "tool_choice": choice})
    grammar = harness.call.options.grammar
    assert grammar is not None
    assert "weather" in grammar.value


async def test_format_is_that_of_a_chat(writing_store: Path) -> None:
    harness = script_responses(writing_store, "{}")
    schema = {"type": "object"}
    named = {"type": "json_schema", "name": "any", "schema": schema, "strict": True}
    for text_format, kind in ((named, "json_schema"), ({"type": "json_object"}, "json_object")):
        await respond(harness, {**QUESTION, "text": {"format": text_format}})
        grammar = harness.call.options.grammar
        assert grammar is not None
        assert grammar.kind == kind
        if kind == "json_schema":
            assert orjson.loads(grammar.value) == schema
    for text in ({"format": {"type": "text"}}, {"verbosity": "low"}, None):
        await respond(harness, {**QUESTION, "text": text})
        assert harness.call.options.grammar is None


async def test_options_are_those_of_a_chat(writing_store: Path) -> None:
    harness = script_responses(writing_store)
    sent = {
        "max_output_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "seed": 5,
        "stop": ["x"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    await respond(harness, {**QUESTION, **sent})
    options, prompt = harness.call.options, harness.call.prompt
    assert options.max_new_tokens == 7
    assert (options.sampling.temperature, options.sampling.top_k) == (0.5, 3)
    assert (options.sampling.seed, options.stop) == (5, ("x",))
    assert isinstance(prompt, Chat)
    assert prompt.variables == (("reasoning_effort", "low"), ("enable_thinking", False))


@pytest.mark.parametrize(
    "ignored",
    [
        {"store": True, "service_tier": "auto", "prompt_cache_key": "a", "max_tool_calls": 3},
        {"background": False, "truncation": "disabled", "previous_response_id": None, "n": 1},
        {"include": ["reasoning.encrypted_content"], "stream_options": {"include_usage": True}},
        {"unknown": 5},
    ],
)
async def test_fields_without_effect_are_accepted(
    ignored: dict[str, Any], writing_store: Path
) -> None:
    harness = script_responses(writing_store)
    body = await respond(harness, {**QUESTION, **ignored})
    assert body["output"][0]["content"][0]["text"] == "Hello"
    assert harness.call.options.logprobs is None


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("sent", "field", "advice"),
    [
        ({"input": None}, "input", "field required"),
        ({"input": None, "messages": [USER]}, "messages", "send `input`"),
        ({"input": []}, "input", "empty list"),
        ({"input": [USER, {**USER, "content": []}]}, "input[1].content", "is an empty list"),
        ({"input": [{**MESSAGE, "content": []}, USER]}, "input[0].content", "is an empty list"),
        ({"input": 5}, "input", "a string"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "earlier items in `input`"),
        ({"conversation": "conv_1"}, "conversation", "earlier items in `input`"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "send its text"),
        ({"background": True}, "background", "wait for the response"),
        ({"truncation": "auto"}, "truncation", "remove items from `input`"),
        ({"n": 2}, "n", "several requests"),
        ({"max_tokens": 5}, "max_tokens", "send `max_output_tokens`"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "send `max_output_tokens`"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "send `reasoning.effort`"),
        ({"response_format": {"type": "text"}}, "response_format", "send `text.format`"),
        ({"grammar": "a"}, "grammar", "send `regex` or `json_schema`"),
        (
            {"regex": "a", "text": {"format": {"type": "json_object"}}},
            "text.format",
            "`text.format` and `regex` exclude each other",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "send `tools`"),
        ({"function_call": "auto"}, "function_call", "send `tool_choice`"),
        ({"logprobs": True}, "logprobs", "send `top_logprobs`"),
        ({"include_reasoning": False}, "include_reasoning", "items of the type `reasoning`"),
        ({"separate_reasoning": False}, "separate_reasoning", "join the items"),
        ({"reasoning_format": "none"}, "reasoning_format", "join the items"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "at most 512"),
        ({"metadata": {"a" * 65: ""}}, f"metadata.{'a' * 65}", "at most 64"),
        ({"input": [{"type": "reasoning", "encrypted_content": "A"}]}, "input", "cannot read"),
        ({"stop_token_ids": [1]}, "stop_token_ids", "send `stop`"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        (
            {"input": [{**USER, "content": [IMAGE]}]},
            "input[0].content[0].type",
            "`input_image` is not supported; models read only texts: send `input_text`",
        ),
        (
            {"input": [function_call("a"), function_output("a", [{"type": "input_file"}])]},
            "input[1].output[0].type",
            "`input_file` is not supported",
        ),
        (
            {"input": [USER, {"type": "item_reference", "id": "msg_1"}]},
            "input[1].type",
            "send the item itself",
        ),
        (
            {"input": [{"type": "web_search_call", "id": "ws_1"}]},
            "input[0].type",
            "`web_search_call` is not supported; send items of the types",
        ),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "'user'"),
        ({"input": [{"role": "user"}]}, "input[0].content", "field required"),
        ({"input": [{"type": "function_call"}]}, "input[0].call_id", "field required"),
        (
            {"tools": [{"type": "web_search"}]},
            "tools[0].type",
            "`web_search` is not supported; this server runs no tools",
        ),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name", "pattern"),
        ({"tools": [WEATHER] * 1_025}, "tools", "at most 1024"),
        ({"tool_choice": "required"}, "tool_choice", "needs `tools`"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "clock"}},
            "tool_choice",
            '{"type": "function", "name": ...}',
        ),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "name one of the `tools`"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "`json_schema`"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            "text.format.schema",
            "`text.format.schema` must be a JSON schema",
        ),
    ],
)
async def test_error_names_the_field_and_what_to_do(
    sent: dict[str, Any], field: str, advice: str, writing_store: Path
) -> None:
    harness = script_responses(writing_store)
    reply = await harness.post(RESPONSES, {**QUESTION, **sent})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field
    assert f"`{field}`" in error["message"]
    assert advice in error["message"]
    assert harness.generator.calls == []


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"input": "long" * 20}, "input"),
        ({"input": [USER, REASONING, {**MESSAGE, "content": "long" * 20}]}, "input[2].content"),
        ({"input": [function_call("a"), function_output("a", "long" * 20)]}, "input[1].output"),
        ({"input": "a", "instructions": "long" * 20}, "instructions"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_long_text_is_named_by_its_path(
    sent: dict[str, Any], field: str, stream: bool, writing_store: Path
) -> None:
    harness = ChatHarness(
        writing_store, settings=IngressUserConfig(limits=LimitSettings(item_chars=60))
    )
    reply = await harness.post(RESPONSES, {**sent, "stream": stream})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
