"""Calls whose arguments are text between tags, as Qwen3-Coder and GLM-4.5 write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from deployments.ingress.apis.openai.tool_calls import FunctionCall, ToolCallParser
from tests.support.chat_harness import CHAT, CHAT_BODY, ChatHarness
from tests.support.generators import ScriptedReply

SCHEMA = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "unit": {"type": ["string", "null"]},
        "places": {"type": "array"},
    }
}
PARSER = ToolCallParser(frozenset({"weather", "clock"}), schemas={"weather": SCHEMA})


REFERRING = {
    "$defs": {
        "Unit": {"enum": ["1", "2"]},
        "Zip": {"type": "string"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]},
    },
    "properties": {
        "unit": {"$ref": "#/$defs/Unit"},
        "zip": {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]},
        "days": {"$ref": "#/$defs/Loop"},
        "other": {"$ref": "#/$defs/Missing/type"},
        "remote": {"$ref": "https://schemas.test/unit.json"},
    },
}


def qwen(name: str = "weather", /, **arguments: str) -> str:
    written = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def glm(name: str = "weather", /, **arguments: str) -> str:
    written = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{written}</tool_call>"


def arguments_of(text: str, parser: ToolCallParser = PARSER) -> dict[str, Any]:
    _, end, (call,) = parser.parse_tool_calls(text)
    assert (end, call.name, call.is_complete) == (0, "weather", True)
    parsed: dict[str, Any] = orjson.loads(call.arguments)
    return parsed


@pytest.mark.parametrize("write", [qwen, glm])
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "Paris", "Paris"),
        ("city", "12", "12"),
        ("city", '"quoted" <b>\n  and indented', '"quoted" <b>\n  and indented'),
        ("days", "3", 3),
        ("days", "three", "three"),
        ("exact", "True", True),
        ("unit", "null", None),
        ("unit", "C", "C"),
        ("places", '["a", {"b": 1}]', ["a", {"b": 1}]),
        ("unknown", "4.5", 4.5),
        ("unknown", "x y", "x y"),
    ],
)
def test_values_have_the_type_of_the_schema(write: Any, key: str, text: str, value: Any) -> None:
    assert arguments_of(write(**{key: text})) == {key: value}


@pytest.mark.parametrize("write", [qwen, glm])
def test_several_arguments_and_none(write: Any) -> None:
    assert arguments_of(write(city="Oslo", days="2")) == {"city": "Oslo", "days": 2}
    assert arguments_of(write()) == {}
    assert arguments_of(write().replace("\n", "")) == {}


@pytest.mark.parametrize(
    "properties",
    [
        None,
        [],
        {"days": True},
        {"days": {"type": 5}},
        {"days": {"type": {"a": 1}}},
        {"days": {"type": [{"a": 1}]}},
        {"days": {"anyOf": [5, {"enum": [{}]}]}},
    ],
)
def test_odd_schemas_do_not_matter(properties: Any) -> None:
    parser = ToolCallParser(PARSER.names, schemas={"weather": {"properties": properties}})
    assert arguments_of(qwen(days="3"), parser) == {"days": 3}
    assert arguments_of(glm(days="3"), ToolCallParser(PARSER.names)) == {"days": 3}


@pytest.mark.parametrize("write", [qwen, glm])
def test_several_calls_after_text(write: Any) -> None:
    text = f"I look. \n{write(city='Oslo')}\n{write('clock')}"
    _, end, calls = PARSER.parse_tool_calls(text)
    assert text[:end].strip() == "I look."
    assert calls == (FunctionCall("weather", '{"city": "Oslo"}'), FunctionCall("clock", "{}"))


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=weather><parameter=city>Oslo<parameter=days>2</function></tool_call>",
        "<tool_call><function=weather><parameter=city>Oslo</parameter><parameter=days>2</tool_call>",
        qwen(city="Oslo", days="2").replace("<tool_call>\n", ""),
        qwen(city="Oslo", days="2").replace("</tool_call>", ""),
        qwen(city="Oslo", days="2").replace("</parameter>\n<", "<"),
    ],
)
def test_qwen_may_omit_tags(text: str) -> None:
    assert arguments_of(text) == {"city": "Oslo", "days": 2}
    assert PARSER.count_content(text[:12]) == 0
    _, end, calls = PARSER.parse_tool_calls(f"I look.\n{text}")
    assert (end, len(calls)) == (8, 1)


def test_functions_may_share_marks() -> None:
    text = qwen(city="Oslo").replace("\n</tool_call>", qwen("clock").removeprefix("<tool_call>"))
    _, _, calls = PARSER.parse_tool_calls(text)
    assert [call.name for call in calls] == ["weather", "clock"]


@pytest.mark.parametrize("write", [qwen, glm])
@pytest.mark.parametrize(
    "quoted",
    [
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        qwen("clock"),
        glm("clock"),
        f"{glm('clock')} and {qwen('clock')}",
        "</function></tool_call>",
        "<tool_call>",
    ],
)
def test_values_may_quote_calls(write: Any, quoted: str) -> None:
    text = write(city=f"See\n{quoted}.")
    assert arguments_of(text) == {"city": f"See\n{quoted}."}
    cut = text[: text.index(".")]
    assert PARSER.parse_tool_calls(cut, is_cut=True) == (
        0, 0, (FunctionCall("weather", "", is_complete=False),),
    )  # fmt: skip


@pytest.mark.parametrize("quoted", [qwen("clock"), glm("clock"), "<function=clock>"])
@pytest.mark.parametrize("marks", [("", ""), ("<tool_call>\n", "\n</tool_call>")])
def test_json_may_quote_tagged_calls(quoted: str, marks: tuple[str, str]) -> None:
    arguments = {"city": f"Use {quoted}."}
    written = orjson.dumps({"name": "weather", "arguments": arguments}).decode()
    assert arguments_of(written.join(marks)) == arguments


@pytest.mark.parametrize("write", [qwen, glm])
@pytest.mark.parametrize(
    "written", ["18446744073709551616", "1.10", "-0", f"{'[' * 900}{']' * 900}", "1e999"]
)
def test_numbers_stay_as_written(write: Any, written: str) -> None:
    _, _, (call,) = PARSER.parse_tool_calls(write(unknown=written))
    assert call.arguments in (f'{{"unknown": {written}}}', f'{{"unknown": "{written}"}}')


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"oneOf": [{"enum": ["a", "b"]}, {"type": "null"}]},
        {"const": "x"},
        {"allOf": [{"type": ["integer", "string"]}]},
    ],
)
def test_strings_are_found_in_alternatives(schema: dict[str, Any]) -> None:
    parser = ToolCallParser(PARSER.names, schemas={"weather": {"properties": {"a": schema}}})
    assert arguments_of(qwen(a="1.10"), parser) == {"a": "1.10"}
    is_nullable = "null" in str(schema)
    assert arguments_of(glm(a="null"), parser) == {"a": None if is_nullable else "null"}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>weather<arg_key>k</arg_key><arg_value>"
        + "<arg_key>k</arg_key><arg_value>" * 9_000,
        '<tool_call>{"name": "weather", "arguments": "' * 3_000,
        "<tool_call><function=weather><parameter=a>" * 3_000,
        "<tool_call>weather<arg_key>" * 3_000,
        "<tool_call>" * 30_000,
        "<tool_call>" + " " * 300_000,
    ],
)
def test_hostile_texts_take_linear_time(text: str) -> None:
    """Without a limit of attempts, each of these takes minutes."""
    names = frozenset({"weather", *(f"function_{number}" for number in range(1_000))})
    assert not ToolCallParser(names).parse_tool_calls(text).calls


@pytest.mark.parametrize(
    "text",
    [
        qwen("unknown", city="Oslo"),
        glm("unknown", city="Oslo"),
        "<tool_call>weather is nice</tool_call>",
        "<tool_call>\n<function=weather>\nOslo\n</function>\n</tool_call>",
        "<tool_call>weather<arg_key>city</arg_key>Oslo</tool_call>",
        qwen(city="Oslo").replace("tool_call", "call"),
    ],
)
def test_other_texts_are_content(text: str) -> None:
    assert PARSER.parse_tool_calls(text) == (0, len(text), ())


@pytest.mark.parametrize("text", [qwen(city="Oslo"), glm(city="Oslo"), qwen("clock"), glm("clock")])
def test_streams_hold_back_what_may_be_a_call(text: str) -> None:
    for count in range(1, len(text)):
        assert PARSER.count_content(text[:count]) == 0
        before = f"I look. {text[:count]}"
        assert PARSER.find_marked_call(before) == len("I look. ")


@pytest.mark.parametrize(
    "text",
    ["<tool_call>wet", "<tool_call>\n<function=we>", "<tool_call>clockwork", "<function=we>"],
)
def test_streams_do_not_hold_back_other_texts(text: str) -> None:
    assert PARSER.count_content(text) == len(text)


@pytest.mark.parametrize("write", [qwen, glm])
def test_call_may_be_cut(write: Any) -> None:
    text = write(city="Oslo", days="2")
    for count in range(1, len(text) - len("</tool_call>") + 1):
        assert not PARSER.parse_tool_calls(text[:count]).calls or "</function>" in text[:count]
        _, _, calls = PARSER.parse_tool_calls(text[:count], is_cut=True)
        if calls:
            assert calls[0].name == "weather"
            assert calls[0].is_complete is ("</function>" in text[:count])
        else:
            assert "city" not in text[:count]


@pytest.mark.parametrize("write", [qwen, glm])
@pytest.mark.parametrize("stream", [False, True])
async def test_chat_returns_tagged_calls(write: Any, stream: bool, writing_store: Path) -> None:
    written = write(city="7", days="7")
    reply = ScriptedReply(tuple(written[i : i + 5] for i in range(0, len(written), 5)))
    harness = ChatHarness(writing_store, lambda call: reply)
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    body = {**CHAT_BODY, "tools": [tool]}
    if stream:
        choices = [event["choices"][0] for event in await harness.events(CHAT, body)]
        assert not any(choice["delta"].get("content") for choice in choices)
        (message,) = (c["delta"] for c in choices if "tool_calls" in c["delta"])
    else:
        choices = (await harness.post(CHAT, body)).json()["choices"]
        message = choices[0]["message"]
    assert choices[-1]["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert orjson.loads(call["function"]["arguments"]) == {"city": "7", "days": 7}


@pytest.mark.parametrize("write", [qwen, glm])
def test_references_of_a_schema_are_followed(write: Any) -> None:
    parser = ToolCallParser(frozenset({"weather"}), schemas={"weather": REFERRING})
    text = write(unit="1", zip="10115", days="7", other="true", remote="3")
    ((call,),) = [parser.parse_tool_calls(text).calls]
    assert orjson.loads(call.arguments) == {
        "unit": "1", "zip": "10115", "days": 7, "other": True, "remote": 3}  # fmt: skip
