"""Calls as Gemma 4 writes them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from deployments.ingress.apis.openai.gemma_calls import read_gemma_arguments
from deployments.ingress.apis.openai.tool_calls import FunctionCall, ToolCallParser
from deployments.messages import CALL_STRING

PARSER = ToolCallParser(frozenset({"weather", "clock"}))
CALL = '<tool_call>call:weather{city:<|"|>Paris, {a}<|"|>,days:3}</tool_call>'


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("{}", {}),
        ('{city:<|"|>Paris<|"|>}', {"city": "Paris"}),
        (
            '{a:<|"|>"x": {y}, [z]\n\\ é<|"|>,b:<|"|><|"|>}',
            {"a": '"x": {y}, [z]\n\\ é', "b": ""},
        ),
        ("{a:1,b:-2.5e3,c:true,d:false,e:null,f:None,g:True}",
         {"a": 1, "b": -2500.0, "c": True, "d": False, "e": None, "f": None, "g": True}),
        (
            '{a:[1,<|"|>x<|"|>,[],{}],b:{c:{d:[2]}}}',
            {"a": [1, "x", [], {}], "b": {"c": {"d": [2]}}},
        ),
        (' { a : 1 , b : [ 1 , 2 ] } ', {"a": 1, "b": [1, 2]}),
        ('{"a":"x\\n",<|"|>b c<|"|>:2}', {"a": "x\n", "b c": 2}),
        ("{city:Paris,code:007}", {"city": "Paris", "code": "007"}),
    ],
)  # fmt: skip
def test_arguments_become_json(text: str, arguments: dict[str, Any]) -> None:
    written = read_gemma_arguments(text)
    assert written is not None
    assert json.loads(written) == arguments


def test_numbers_keep_their_digits() -> None:
    assert read_gemma_arguments("{a:12345678901234567890.10}") == '{"a": 12345678901234567890.10}'


@pytest.mark.parametrize(
    "text",
    ["", "a:1", "{a:1", "{a:1}}", "{a}", "{:1}", "{a:}", "{a:1,}", "{a:1 b:2,}", '{a:<|"|>x}',
     "{a:[1}", '{"\\q":1}', "{a:" * 200 + "1" + "}" * 200],
)  # fmt: skip
def test_other_texts_are_no_arguments(text: str) -> None:
    assert read_gemma_arguments(text) is None


def write(value: object) -> str:
    """Write a value as Gemma 4 does."""
    if isinstance(value, str):
        return f"{CALL_STRING}{value}{CALL_STRING}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{write(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    return json.dumps(value)


def test_random_arguments_are_read_as_written() -> None:
    generator = random.Random(0)

    def draw(depth: int) -> Any:
        kind = generator.randrange(7 if depth else 5)
        if kind == 5:
            return [draw(depth - 1) for _ in range(generator.randrange(4))]
        if kind == 6:
            return {f"key{i}": draw(depth - 1) for i in range(generator.randrange(4))}
        characters = '{}[]:,"<|> \nabé'
        text = "".join(generator.choices(characters, k=generator.randrange(9)))
        return [generator.randrange(-99, 99), generator.random(), True, None, text][kind]

    for _ in range(300):
        arguments = {"first": draw(4), "second": draw(3)}
        if CALL_STRING not in json.dumps(arguments, ensure_ascii=False):
            written = read_gemma_arguments(write(arguments))
            assert written is not None
            assert json.loads(written) == arguments


@pytest.mark.parametrize("text", [CALL, CALL.replace("<tool_call>", "<tool_call> ")])
def test_call_is_parsed(text: str) -> None:
    arguments = '{"city": "Paris, {a}", "days": 3}'
    assert PARSER.parse_tool_calls(text) == (0, 0, (FunctionCall("weather", arguments),))


def test_several_calls_and_the_text_before_them_are_parsed() -> None:
    parsed = PARSER.parse_tool_calls(f"One moment.{CALL}<tool_call>call:clock{{}}</tool_call>")
    assert (parsed.start, parsed.end) == (0, len("One moment."))
    assert [call.name for call in parsed.calls] == ["weather", "clock"]
    assert parsed.calls[1].arguments == "{}"


def test_call_of_another_function_is_content() -> None:
    other = CALL.replace("weather", "rain")
    assert PARSER.parse_tool_calls(other) == (0, len(other), ())


@pytest.mark.parametrize("text", ["call:weather{}", "call: me"])
def test_call_without_a_mark_is_content(text: str) -> None:
    assert PARSER.parse_tool_calls(text) == (0, len(text), ())
    assert PARSER.count_content(text) == len(text)


@pytest.mark.parametrize("end", range(len("<tool_call>call:weather{"), len(CALL) - 13))
def test_cut_call_is_incomplete(end: int) -> None:
    parsed = PARSER.parse_tool_calls(CALL[:end], is_cut=True)
    assert parsed.calls == (FunctionCall("weather", "", is_complete=False),)


@pytest.mark.parametrize("end", range(1, len(CALL)))
def test_stream_holds_a_call_back(end: int) -> None:
    assert PARSER.count_content(CALL[:end]) == 0
    assert PARSER.count_content(f"One moment.{CALL[:end]}") == len("One moment.")
