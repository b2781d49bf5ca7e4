"""Calls whose arguments are text between tags, as Qwen3-Coder and GLM-4.5 write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from deployments.ingress.apis.openai.tools import FunctionCall, ToolCallParser
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
    end, (call,) = parser.parse_tool_calls(text)
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


@pytest.mark.parametrize("properties", [None, [], {"days": True}, {"days": {"type": 5}}])
def test_odd_schemas_do_not_matter(properties: Any) -> None:
    parser = ToolCallParser(PARSER.names, schemas={"weather": {"properties": properties}})
    assert arguments_of(qwen(days="3"), parser) == {"days": 3}
    assert arguments_of(glm(days="3"), ToolCallParser(PARSER.names)) == {"days": 3}


@pytest.mark.parametrize("write", [qwen, glm])
def test_several_calls_after_text(write: Any) -> None:
    text = f"I look. \n{write(city='Oslo')}\n{write('clock')}"
    end, calls = PARSER.parse_tool_calls(text)
    assert text[:end].strip() == "I look."
    assert calls == (FunctionCall("weather", '{"city":"Oslo"}'), FunctionCall("clock", "{}"))


def test_models_may_omit_tags_that_end_values() -> None:
    text = "<tool_call><function=weather><parameter=city>Oslo<parameter=days>2</function>"
    assert arguments_of(text) == {"city": "Oslo", "days": 2}


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
    assert PARSER.parse_tool_calls(text) == (len(text), ())


@pytest.mark.parametrize("text", [qwen(city="Oslo"), glm(city="Oslo"), qwen("clock"), glm("clock")])
def test_streams_hold_back_what_may_be_a_call(text: str) -> None:
    for count in range(1, len(text)):
        assert PARSER.count_content(text[:count]) == 0
        before = f"I look. {text[:count]}"
        assert PARSER.find_marked_call(before) == len("I look. ")


@pytest.mark.parametrize(
    "text", ["<tool_call>wet", "<tool_call>\n<function=we>", "<tool_call>clockwork"]
)
def test_streams_do_not_hold_back_other_texts(text: str) -> None:
    assert PARSER.count_content(text) == len(text)


@pytest.mark.parametrize("write", [qwen, glm])
def test_call_may_be_cut(write: Any) -> None:
    text = write(city="Oslo", days="2")
    cut = text[: text.index("Oslo") + 2]
    assert PARSER.parse_tool_calls(cut) == (len(cut), ())
    expected = (0, (FunctionCall("weather", "", is_complete=False),))
    assert PARSER.parse_tool_calls(cut, is_cut=True) == expected


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
