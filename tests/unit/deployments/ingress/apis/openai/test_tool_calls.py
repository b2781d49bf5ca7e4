from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from deployments.ingress.apis.openai.tool_calls import MAX_PREFIX_CHARS, ToolCallParser
from deployments.messages import Chat, FinishReason
from tests.support.chat_harness import CHAT, CHAT_BODY, ChatHarness
from tests.support.generators import ScriptedReply

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "$defs": {"City": {"type": "string"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = {**CHAT_BODY, "tools": [WEATHER, CLOCK]}
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
QA_MODEL = ToolCallParser(frozenset({"weather", "clock"}))


def script_text(store: Path, *pieces: str, reason: FinishReason = FinishReason.END) -> ChatHarness:
    return ChatHarness(store, lambda call: ScriptedReply(pieces, reason))


def letters(text: str) -> tuple[str, ...]:
    return tuple(text)


async def test_template_receives_tools_unchanged(writing_store: Path) -> None:
    harness = ChatHarness(writing_store)
    await harness.post(CHAT, TOOLS)
    prompt = harness.call.prompt
    assert isinstance(prompt, Chat)
    assert prompt.tools == (WEATHER, CLOCK)
    assert harness.call.options.grammar is None


@pytest.mark.parametrize("changes", [{"tool_choice": "none"}, {"tools": []}])
async def test_calls_without_tools_are_text(changes: dict[str, Any], writing_store: Path) -> None:
    harness = script_text(writing_store, CALL)
    message = (await harness.post(CHAT, {**TOOLS, **changes})).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": CALL}
    prompt = harness.call.prompt
    assert isinstance(prompt, Chat)
    assert prompt.tools == ()


CALL_TEXTS = [
    CALL,
    f"<tool_call>\n{CALL}\n</tool_call>",
    f"<tool_call>[{CALL}]</tool_call>",
    f"\n {CALL} \n",
    '[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rome"}}]',
    '{"parameters": {"city": "Rome"}, "name": "weather"}',
    '{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}',
    '[{ "type" : "function", "name": "weather", "parameters": {"city": "Rome"}}]',
    '{"id": "abc", "name": "weather", "arguments": {"city": "Rome"}}',
    '{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}',
    '<tool_call>[{"why": "\\"a, {b\\\\", "n": -1.5e3, "x": null, "name": "weather", '
    '"arguments": {"city": "Rome"}}]',
]


@pytest.mark.parametrize("text", CALL_TEXTS)
async def test_text_that_is_a_call_becomes_a_tool_call(text: str, writing_store: Path) -> None:
    body = (await script_text(writing_store, text).post(CHAT, TOOLS)).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert re.fullmatch("[a-z0-9]{9}", call.pop("id")), "the form that Mistral's templates accept"
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    assert orjson.loads(call["function"]["arguments"]) == {"city": "Rome"}


@pytest.mark.parametrize("separator", ["; ", ";", "\n", "\n\n", " ;\n"])
async def test_calls_one_after_the_other_are_all_calls(separator: str, writing_store: Path) -> None:
    text = separator.join([CALL, '{"name": "clock", "parameters": {}}', CALL])
    harness = script_text(writing_store, *letters(text))
    message = (await harness.post(CHAT, TOOLS)).json()["choices"][0]["message"]
    names = [call["function"]["name"] for call in message["tool_calls"]]
    assert (names, message["content"]) == (["weather", "clock", "weather"], None)
    streamed = [event["choices"][0]["delta"] for event in await harness.events(CHAT, TOOLS)]
    assert [call["function"]["name"] for d in streamed for call in d.get("tool_calls", ())] == names
    assert not any(delta.get("content") for delta in streamed)


@pytest.mark.parametrize("arguments", ["null", '""', '"{}"'])
async def test_call_without_arguments_has_an_empty_object(
    arguments: str, writing_store: Path
) -> None:
    text = f'{{"name": "clock", "arguments": {arguments}}}'
    body = (await script_text(writing_store, text).post(CHAT, TOOLS)).json()
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": "{}"}


async def test_only_the_first_of_several_calls_counts_if_the_client_asks(
    writing_store: Path,
) -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    for is_parallel, count in ((None, 2), (True, 2), (False, 1)):
        sent = {**TOOLS, "parallel_tool_calls": is_parallel}
        body = (await script_text(writing_store, text).post(CHAT, sent)).json()
        assert len(body["choices"][0]["message"]["tool_calls"]) == count


@pytest.mark.parametrize(
    "text",
    [
        "It rains.",
        f"I call {CALL}",
        f"{CALL}; and so on",
        f"{CALL}, {CALL}",
        f"{CALL} as you asked",
        f"I call <tool_call>{CALL}</tool_call> as you asked",
        "I call <tool_call> and <tool",
        '{"name": "other", "arguments": {}}',
        '{"name": "weather", "arguments": "Rome"}',
        '{"name": "weather", "arguments": "[]"}',
        '{"name": "weather", "arguments": {"city": "Ro',
        '{"name": 7}',
        '{"arguments": {}, "name": ["weather"]}',
        f'[{CALL}, {{"name": "other"}}]',
        '{"of": {}, "name": "weather", "arguments": {}}',
        f'{{"why": "{"x" * MAX_PREFIX_CHARS}", "name": "weather", "arguments": {{}}}}',
        '{"why": "It rains',
        "[]7",
        "[]",
        "{}",
    ],
)
async def test_text_that_is_not_a_call_stays_text(text: str, writing_store: Path) -> None:
    full = (await script_text(writing_store, text).post(CHAT, TOOLS)).json()["choices"][0]
    assert full["message"] == {"role": "assistant", "content": text}
    assert full["finish_reason"] == "stop"
    events = await script_text(writing_store, *letters(text)).events(CHAT, TOOLS)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert not any("tool_calls" in delta for delta in deltas)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "before",
    [
        "I will look.",
        "<think>\nRome. 1 < 2, <b>\n</think>",
        "1 <tool",
        "<think> a <tool_call> block of </tool_call> </think>",
        '<tool_call>{"name": "other"}</tool_call>',
        '<think>Or <tool_call>{"name": "weather", ...}</tool_call>.</think>',
        f"As in <tool_call>{CALL}</tool_call> before:",
        f"{CALL} was the first.",
        "<tool_call>",
        "</tool_call>",
    ],
)
async def test_text_before_marked_calls_is_content(before: str, writing_store: Path) -> None:
    text = f"{before}\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"
    (choice,) = (await script_text(writing_store, text).post(CHAT, TOOLS)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == before
    assert len(choice["message"]["tool_calls"]) == 2
    for pieces in (letters(text), (text,)):
        events = await script_text(writing_store, *pieces).events(CHAT, TOOLS)
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content", "") for delta in deltas) == before
        (called,) = (delta["tool_calls"] for delta in deltas if "tool_calls" in delta)
        assert [call["function"]["name"] for call in called] == ["weather", "weather"]
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "use <tool_call> tags"}',
        '{"city": "</tool_call>"}',
        '{"city": "<tool_call>{\\"name\\": \\"weather\\"}"}',
        '{"city": 123456789012345678901234567890, "x": [1.10, 1e999]}',
    ],
)
@pytest.mark.parametrize("form", ["{}", "<tool_call>{}</tool_call>", "Rome <tool_call>[{}]"])
async def test_arguments_are_the_text_of_the_model(
    form: str, arguments: str, writing_store: Path
) -> None:
    call = f'{{"name": "weather", "arguments": {arguments}}}'
    text = form.replace("{}", call)
    body = (await script_text(writing_store, text).post(CHAT, TOOLS)).json()
    events = await script_text(writing_store, *letters(text)).events(CHAT, TOOLS)
    deltas = [event["choices"][0]["delta"] for event in events]
    for message in (body["choices"][0]["message"], deltas[-2]):
        (call,) = message["tool_calls"]
        assert call["function"]["arguments"] == arguments


async def test_stream_does_not_hold_back_text_after_a_mark_without_a_call(
    writing_store: Path,
) -> None:
    pieces = ("A <tool_call> is", " a mark.", " So")
    events = await script_text(writing_store, *pieces).events(CHAT, TOOLS)
    deltas = [event["choices"][0]["delta"].get("content") for event in events]
    assert deltas == ["", *pieces, None]


async def test_several_calls_keep_their_order(writing_store: Path) -> None:
    text = f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "clock"}}</tool_call>'
    body = (await script_text(writing_store, text).post(CHAT, TOOLS)).json()
    calls = body["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "clock"]
    assert calls[1]["function"]["arguments"] == "{}"
    events = await script_text(writing_store, *letters(text)).events(CHAT, TOOLS)
    deltas = [event["choices"][0]["delta"] for event in events]
    streamed = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in streamed] == [
        (0, "weather"),
        (1, "clock"),
    ]
    assert streamed[0]["id"] != streamed[1]["id"]


@pytest.mark.parametrize("text", CALL_TEXTS)
async def test_stream_has_a_call_in_one_delta(text: str, writing_store: Path) -> None:
    events = await script_text(writing_store, *letters(text)).events(CHAT, TOOLS)
    first, called, last = [event["choices"][0] for event in events]
    assert first["delta"] == {"role": "assistant", "content": ""}
    (call,) = called["delta"]["tool_calls"]
    assert (call["index"], call["type"]) == (0, "function")
    assert len(call["id"]) == 9
    assert orjson.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")


@pytest.mark.parametrize("text", [CALL, f"I look. <tool_call>{CALL}</tool_call>"])
async def test_stream_with_a_call_has_the_logprobs_of_all_tokens(
    text: str, writing_store: Path
) -> None:
    body = {**TOOLS, "logprobs": True}
    full = (await script_text(writing_store, *letters(text)).post(CHAT, body)).json()
    events = await script_text(writing_store, *letters(text)).events(CHAT, body)
    logprobs = [event["choices"][0]["logprobs"] for event in events]
    tokens = [token for each in logprobs if each for token in each["content"]]
    assert tokens == full["choices"][0]["logprobs"]["content"]
    assert len(tokens) == len(text)


async def test_stream_holds_back_possible_calls_only(writing_store: Path) -> None:
    pieces = ('{"name', '": "we', "athering", '"} and so on')
    events = await script_text(writing_store, *pieces).events(CHAT, TOOLS)
    deltas = [event["choices"][0]["delta"].get("content") for event in events]
    assert deltas == ["", '{"name": "weathering', '"} and so on', None]


@pytest.mark.parametrize(
    ("text", "possible"),
    [
        ("", True),
        (" \n", True),
        ("<tool", True),
        ("<tool_call>\n[{", True),
        ('{ "name" : "cl', True),
        ('{"arguments": {"x": 1', True),
        ('{"type": "function", "description"', True),
        ('{"id": 7, "na', True),
        ('{"id": "7\\"', True),
        ('{"city"', True),
        ('{"city": tru', True),
        ('{"city": "Rome"}', False),
        ('{"city": ["Rome"', False),
        ('{"city": "Rome", "name": "cock', False),
        ('{"name": "cock', False),
        ('{"name": 7', False),
        ("<b>", False),
        ("The", False),
        pytest.param(" " * MAX_PREFIX_CHARS, False, id="white space for too long"),
        pytest.param('{"city": "'.ljust(MAX_PREFIX_CHARS - 1, "x"), True, id="undecided"),
        pytest.param('{"city": "'.ljust(MAX_PREFIX_CHARS, "x"), False, id="undecided for too long"),
    ],
)
def test_may_start_tool_call_detects_prefixes(text: str, possible: bool) -> None:
    assert QA_MODEL.may_start_tool_call(text) is possible
