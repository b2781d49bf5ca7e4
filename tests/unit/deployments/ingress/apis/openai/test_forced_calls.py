"""Forced calls: the grammar of a call, and texts that end before the call does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest

from deployments.ingress.apis.openai.tool_calls import ToolCallParser
from deployments.messages import FinishReason
from tests.support.chat_harness import CHAT, CHAT_BODY, ChatHarness
from tests.unit.deployments.ingress.apis.openai.test_tool_calls import (
    CALL,
    TOOLS,
    WEATHER,
    letters,
    script_text,
)

REQUIRED = {**TOOLS, "tool_choice": "required"}


def grammar_schema(harness: ChatHarness) -> Any:
    grammar = harness.call.options.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    schema = orjson.loads(grammar.value)
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def accepts(schema: Any, texts: Sequence[str]) -> list[bool]:
    validator = jsonschema.Draft202012Validator(schema)
    return [validator.is_valid(orjson.loads(text)) for text in texts]


async def test_forced_call_replaces_the_response_format(writing_store: Path) -> None:
    harness = ChatHarness(writing_store)
    forced = {**TOOLS, "tool_choice": "required"}
    await harness.post(CHAT, forced)
    grammar = harness.call.options.grammar
    await harness.post(CHAT, {**forced, "response_format": {"type": "json_object"}})
    assert harness.call.options.grammar == grammar


async def test_schema_of_the_answer_allows_a_call_instead(writing_store: Path) -> None:
    answer = {
        "$id": "answer",
        "$defs": {"Text": {"type": "string"}},
        "properties": {"answer": {"$ref": "#/$defs/Text"}},
        "required": ["answer"],
    }
    chosen = {"type": "json_schema", "json_schema": {"schema": answer}}
    harness = script_text(writing_store, CALL)
    response = await harness.post(CHAT, {**TOOLS, "response_format": chosen})
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    texts = (
        CALL,
        '{"name": "clock", "arguments": {"any": [1]}}',
        '{"answer": "sunny"}',
        '{"answer": 7}',
        '{"name": "other", "arguments": {}}',
    )
    assert accepts(grammar_schema(harness), texts) == [True, True, True, False, False]
    await harness.post(CHAT, {**TOOLS, "response_format": chosen, "tool_choice": "none"})
    assert accepts(grammar_schema(harness), texts) == [False, False, True, False, False]


async def test_required_call_compiles_a_grammar_of_all_tools(writing_store: Path) -> None:
    harness = script_text(writing_store, CALL)
    response = await harness.post(CHAT, {**TOOLS, "tool_choice": "required"})
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    texts = (
        CALL,
        '{"name": "clock", "arguments": {}}',
        '{"name": "weather", "arguments": {"city": 7}}',
        '{"name": "weather", "arguments": {}}',
        '{"name": "other", "arguments": {}}',
        '{"name": "clock"}',
    )
    assert accepts(grammar_schema(harness), texts) == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "clock"}},
        {"function": {"name": "clock"}},
    ],
)
async def test_named_function_compiles_a_grammar_of_one_tool(
    choice: Any, writing_store: Path
) -> None:
    harness = script_text(writing_store, '{"name": "clock", "arguments": {}}')
    await harness.post(CHAT, {**TOOLS, "tool_choice": choice})
    texts = ('{"name": "clock", "arguments": {}}', CALL)
    assert accepts(grammar_schema(harness), texts) == [True, False]


TREE = {
    "properties": {
        "name": {"type": "string"},
        "child": {"$ref": "#"},
        "alias": {"$ref": "#/properties/name"},
        "city": {"$ref": "#/$defs/City"},
        "kind": {"$ref": "#/definitions/Kind"},
    },
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome"]}},
    "definitions": {"Kind": {"anyOf": [{"enum": ["oak"]}, {"$ref": "#/$defs/City"}]}},
}


@pytest.mark.parametrize(
    ("arguments", "is_valid"),
    [
        ({"name": "a", "child": {"name": "b", "child": {}}}, True),
        ({"child": {"name": "weather", "arguments": {}}}, False),
        ({"alias": "a", "city": "Rome", "kind": "oak"}, True),
        ({"kind": "Rome"}, True),
        ({"alias": 7}, False),
        ({"city": "Oslo"}, False),
        ({"kind": "ash"}, False),
        (5, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("more", [{}, {"$id": "https://example.org/tree"}])
async def test_forced_arguments_match_the_parameters(
    more: dict[str, str], arguments: Any, is_valid: bool, writing_store: Path
) -> None:
    harness = ChatHarness(writing_store)
    tree = {"type": "function", "function": {"name": "tree", "parameters": {**TREE, **more}}}
    await harness.post(CHAT, {**CHAT_BODY, "tools": [WEATHER, tree], "tool_choice": "required"})
    text = orjson.dumps({"name": "tree", "arguments": arguments}).decode()
    assert accepts(grammar_schema(harness), [text]) == [is_valid]


CITY = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    ("parameters", "allowed", "rejected"),
    [
        (None, {}, {"x": 1}),
        ({}, {}, {"x": 1}),
        ({"type": "object", "properties": {}}, {}, {"x": 1}),
        (CITY, {"city": "Rome"}, {"city": "Rome", "x": 1}),
        ({**CITY, "required": ["city"]}, {"city": "Rome"}, {"city": "Rome", "x": 1}),
        ({**CITY, "additionalProperties": True}, {"city": "Rome", "x": 1}, {"city": 7}),
        ({**CITY, "additionalProperties": {"type": "integer"}}, {"x": 1}, {"x": "a"}),
        ({**CITY, "patternProperties": {"^x": {"type": "integer"}}}, {"x": 1}, {"x": "a"}),
        ({"allOf": [CITY, {"properties": {"x": {"type": "integer"}}}]}, {"x": 1}, {"x": "a"}),
        ({"$ref": "#/$defs/City", "$defs": {"City": CITY}}, {"city": "Rome"}, {"city": 7}),
        ({"enum": [{"x": 1}]}, {"x": 1}, {"x": 2}),
        ({**CITY, "required": ["x"]}, {"x": 1}, {"city": "Rome"}),
        ({**CITY, "minProperties": 2}, {"city": "Rome", "x": 1}, {"city": "Rome"}),
    ],
)
async def test_forced_call_has_only_the_members_that_the_parameters_describe(
    parameters: Any, allowed: Any, rejected: Any, writing_store: Path
) -> None:
    harness = ChatHarness(writing_store)
    function = {"name": "f"} if parameters is None else {"name": "f", "parameters": parameters}
    tool = {"type": "function", "function": function}
    await harness.post(CHAT, {**CHAT_BODY, "tools": [tool], "tool_choice": "required"})
    texts = [
        orjson.dumps({"name": "f", "arguments": each}).decode() for each in (allowed, rejected)
    ]
    assert accepts(grammar_schema(harness), texts) == [True, False]


@pytest.mark.parametrize(
    "parameters", [{"properties": 7}, {"required": [[]]}, {"required": "city"}]
)
async def test_invalid_parameters_reach_the_compiler_of_grammars(
    parameters: Any, writing_store: Path
) -> None:
    harness = ChatHarness(writing_store)
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {**CHAT_BODY, "tools": [tool], "tool_choice": "required"}
    assert (await harness.post(CHAT, body)).status_code == 200
    grammar = harness.call.options.grammar
    assert grammar is not None
    assert orjson.loads(grammar.value)["$defs"]["0"] == {**parameters, "type": "object"}


CUT_CALLS = [
    ('{"name": "weather"', ""),
    ('{ "name": "weather", "argum', ""),
    ('{"name": "weather", "arguments": ', ""),
    ('{"name":"weather","arguments":{"city": "Ro', '{"city": "Ro'),
    ('{"name": "weather", "arguments": {"city": "Rome"}', '{"city": "Rome"}'),
]


@pytest.mark.parametrize(("text", "arguments"), CUT_CALLS)
@pytest.mark.parametrize(
    ("reason", "finish"), [(FinishReason.LENGTH, "length"), (FinishReason.STOP, "stop")]
)
async def test_cut_call_has_the_start_of_its_arguments(
    text: str, arguments: str, reason: FinishReason, finish: str, writing_store: Path
) -> None:
    harness = script_text(writing_store, *letters(text), reason=reason)
    (full,) = (await harness.post(CHAT, REQUIRED)).json()["choices"]
    events = await harness.events(CHAT, REQUIRED)
    first, called, last = [event["choices"][0] for event in events]
    assert full["message"]["content"] is None
    assert first["delta"] == {"role": "assistant", "content": None}
    for message in (full["message"], called["delta"]):
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": arguments}
    assert (last["delta"], last["finish_reason"], full["finish_reason"]) == ({}, finish, finish)


@pytest.mark.parametrize("text", ["", "{", '{"name": "', '{"name": "weath'])
async def test_call_that_is_cut_before_its_name_ends_is_no_content(
    text: str, writing_store: Path
) -> None:
    harness = script_text(writing_store, *letters(text), reason=FinishReason.LENGTH)
    (full,) = (await harness.post(CHAT, REQUIRED)).json()["choices"]
    assert full["message"] == {"role": "assistant", "content": None}
    assert full["finish_reason"] == "length"
    events = await harness.events(CHAT, REQUIRED)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [{"role": "assistant", "content": None}, {}]
    history = [*CHAT_BODY["messages"], full["message"], *CHAT_BODY["messages"]]
    repeated = await harness.post(CHAT, {**REQUIRED, "messages": history})
    assert repeated.status_code == 200, "clients send the answer back"


@pytest.mark.parametrize("text", ['{"name": "weath', CUT_CALLS[3][0]])
async def test_stream_with_a_cut_call_has_the_logprobs_of_all_tokens(
    text: str, writing_store: Path
) -> None:
    harness = script_text(writing_store, *letters(text), reason=FinishReason.LENGTH)
    body = {**REQUIRED, "logprobs": True}
    (full,) = (await harness.post(CHAT, body)).json()["choices"]
    events = await harness.events(CHAT, body)
    logprobs = [event["choices"][0]["logprobs"] for event in events]
    tokens = [token for each in logprobs if each for token in each["content"]]
    assert tokens == full["logprobs"]["content"]
    assert len(tokens) == len(text)


async def test_stream_of_a_forced_call_begins_without_content(writing_store: Path) -> None:
    events = await script_text(writing_store, *letters(CALL)).events(CHAT, REQUIRED)
    first, called, last = [event["choices"][0] for event in events]
    assert first["delta"] == {"role": "assistant", "content": None}
    assert called["delta"]["tool_calls"][0]["function"]["name"] == "weather"
    assert last["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("mark", ["<tool_call>{", "<tool_call>[{"])
def test_complete_call_with_a_mark_in_its_arguments_is_complete(mark: str) -> None:
    arguments = {"city": mark}
    text = orjson.dumps({"name": "weather", "arguments": arguments}).decode()
    parser = ToolCallParser(frozenset({"weather"}), is_forced=True)
    (call,) = parser.parse_tool_calls(text).calls
    assert call.is_complete
    assert orjson.loads(call.arguments) == arguments
