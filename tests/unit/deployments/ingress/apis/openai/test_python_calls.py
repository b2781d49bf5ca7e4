"""Calls as a list in Python, calls of Mistral, and calls that come before other text."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from deployments.ingress.apis.openai import tool_calls
from deployments.ingress.apis.openai.python_calls import PythonCalls, scan_python_calls
from deployments.ingress.apis.openai.tool_calls import FunctionCall, ToolCallParser
from deployments.messages import FinishReason
from tests.support.chat_harness import CHAT
from tests.unit.deployments.ingress.apis.openai.test_tool_calls import (
    CALL,
    TOOLS,
    letters,
    script_text,
)

PARSER = ToolCallParser(frozenset({"weather", "clock", "time.now"}))


def marked(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


@pytest.mark.parametrize("form", ["{}", marked("{}"), " {}\n", f"\n{marked(' {} ')}"])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("", {}),
        ('city="Rome"', {"city": "Rome"}),
        ("city='It\\'s [Rome], (x)', days=3", {"city": "It's [Rome], (x)", "days": 3}),
        ("a=True, b=None, c=-1.5, d=false, e=null", {
            "a": True, "b": None, "c": -1.5, "d": False, "e": None}),
        ('a=[1, "x", (2, 3)], b={"k": {"n": true}}', {
            "a": [1, "x", [2, 3]], "b": {"k": {"n": True}}}),
        ("id=123456789012345678901234567890", {"id": 123456789012345678901234567890}),
        ('city="Zürich </tool_call>"', {"city": "Zürich </tool_call>"}),
        ("from='a', user-id=\"b\", class=1,", {"from": "a", "user-id": "b", "class": 1}),
        ("zip=01234, a='x\ny'", {"zip": "01234", "a": "x\ny"}),
        (r"a='\d+\n\'\x41\u0042\U00000043\\'", {"a": "\\d+\n'ABC\\"}),
        (r'a="\ud83d\ude00", b="\ud83d"', {"a": "😀", "b": "\ufffd"}),
        (r"a='\xzz\u12'", {"a": r"\xzz\u12"}),
    ],
)  # fmt: skip
def test_list_of_calls(form: str, written: str, arguments: dict[str, Any]) -> None:
    text = form.replace("{}", f"[weather({written}), time.now()]")
    start, end, (first, second) = PARSER.parse_tool_calls(text)
    assert start == end
    assert (first.name, json.loads(first.arguments)) == ("weather", arguments)
    assert second == FunctionCall("time.now", "{}")


@pytest.mark.parametrize(
    "text",
    [
        "[weather]",
        "[weather(]",
        '[weather("Rome")]',
        "[weather(**{})]",
        "[weather(a=1, a=2)]",
        "[weather(a=x)]",
        "[weather(a={1: 2})]",
        "[weather(a={**{}})]",
        "[weather(a={1})]",
        "[weather(a=b'x')]",
        "[weather(a=1_000)]",
        "[weather(a=.5)]",
        "[weather(a='x' + 'y')]",
        "[weather()] # as you asked",
        "[weather(a='x'), ['y']]",
        "[weather(a=f'{1}')]",
        "[weather(a=1)] as you asked",
        "[other()]",
        "[weather(), other()]",
        "[weather(), 1]",
        "[weather() for x in y]",
        f"[weather(a={'[' * 10_000})]",
        f"[weather(a={'-' * 100_000}1)]",
        "[*weather()]",
        "weather()",
    ],
)
def test_other_texts_are_content(text: str) -> None:
    assert PARSER.parse_tool_calls(text) == (0, len(text), ())


@pytest.mark.parametrize(
    ("text", "possible"),
    [
        ("[", True), ("[ wea", True), ("[weather(", True), ("[weather (a=1", True),
        ("[weather,", False), ("[weathers(", False), ("[1", False), ("[the", False),
        ("<tool_call>[we", True), ("<tool_call>[1", False), ("[time.n", True),
        ("<tool_call>weather[AR", True), ("<tool_call>weather[CALL_ID]a[", True),
        ("<tool_call>weather[1", False), ("weather[ARGS]{", False),
    ],
)  # fmt: skip
def test_streams_hold_back_what_may_be_a_call(text: str, possible: bool) -> None:
    assert PARSER.may_start_tool_call(text) is possible


@pytest.mark.parametrize("written", ["[ARGS]", "[CALL_ID]a1b2c3d4e[ARGS]", " [ARGS] "])
def test_calls_of_mistral(written: str) -> None:
    text = f'<tool_call>weather{written}{{"city": "Rome"}}<tool_call>clock{written}{{}}'
    assert PARSER.parse_tool_calls(text) == (
        0, 0, (FunctionCall("weather", '{"city": "Rome"}'), FunctionCall("clock", "{}")),
    )  # fmt: skip
    for wrong in ("[]", '"x"', "{", "{} x"):
        other = f"<tool_call>weather{written}{wrong}"
        assert PARSER.parse_tool_calls(other) == (0, len(other), ())


@pytest.mark.parametrize("written", ["1.10", "-0.12345678901234567890", "1e999", "7" * 5_000])
def test_numbers_stay_as_written(written: str) -> None:
    ((call,),) = [PARSER.parse_tool_calls(f"[weather(a={written})]").calls]
    assert call.arguments == f'{{"a": {written}}}'


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[weather(city='Ro", ""),
        ("[weather(", ""),
        ("<tool_call>[weather(a=[1, {'b': 2", ""),
        ('<tool_call>weather[ARGS]{"city": "Ro', '{"city": "Ro'),
        ("<tool_call>weather[CALL_ID]abc[ARGS]", ""),
    ],
)
def test_call_that_is_cut_is_incomplete(text: str, arguments: str) -> None:
    cut = (FunctionCall("weather", arguments, is_complete=False),)
    assert PARSER.parse_tool_calls(text, is_cut=True) == (0, 0, cut)
    assert PARSER.parse_tool_calls(text).calls == ()


def test_complete_calls_before_a_cut_one_are_kept() -> None:
    first = FunctionCall("weather", '{"city": "a"}')
    text = "<tool_call>[weather(city='a'), clock("
    calls = PARSER.parse_tool_calls(text, is_cut=True).calls
    assert calls == (first, FunctionCall("clock", "", is_complete=False))
    for rest in ("<tool_", "<tool_call>", "<tool_call>clo", "<tool_call>[clo"):
        text = f"{marked('[weather(city=1)]')}{rest}"
        parsed = PARSER.parse_tool_calls(text, is_cut=True)
        assert [call.name for call in parsed.calls] == ["weather"]
        assert parsed.start == parsed.end


@pytest.mark.parametrize(
    "text",
    [
        "[clock (the one on the wall)](http://x) is a long article about clocks and",
        "[weather(city='a')] is how you call it. First,",
        "[weather(x) for x in cities] builds a list of",
        "<tool_call>weather[ARGS]{} and prose that goes on",
        "<tool_call>weather[ARGS]x",
    ],
)
def test_prose_that_is_cut_is_content(text: str) -> None:
    assert PARSER.parse_tool_calls(text, is_cut=True) == (0, len(text), ())


def test_several_calls_may_precede_content() -> None:
    text = f"\n{marked('[weather()]')}\n{marked(CALL)}{marked('[clock()]')} Some text."
    start, end, calls = PARSER.parse_tool_calls(text)
    assert [call.name for call in calls] == ["weather", "weather", "clock"]
    assert text[start:end].strip() == "Some text."


IN_ARGUMENTS = ("1,", "a=1,", "[", "'", '"', "{'a':", "(", "\\", "=", " ", "01,")


@pytest.mark.parametrize(
    ("before", "unit"),
    [
        *product(("[weather(", "<tool_call>[weather(a=["), IN_ARGUMENTS),
        *product(("[", "<tool_call>["), ("x(),", "weather(a=1),", "weather(a='</tool_call>'),")),
    ],
)
def test_hostile_texts_are_scanned_once(
    before: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scanning again at every mark would take seconds."""
    starts: list[int] = []

    def scan(text: str, start: int = 0) -> PythonCalls | None:
        starts.append(start)
        return scan_python_calls(text, start)

    monkeypatch.setattr(tool_calls, "scan_python_calls", scan)
    tail = ("</tool_call>" * 8 + "<tool_call>[weather(") * 8
    for text in (before + unit * 20_000, before + unit * 20_000 + tail):
        for is_cut in (False, True):
            starts.clear()
            PARSER.parse_tool_calls(text, is_cut=is_cut)
            assert starts, "the text is no candidate: the test shows nothing"
            assert len(starts) == len(set(starts))


@pytest.mark.parametrize("call", [CALL, f"[{CALL}]", '[weather(city="Rome")]'])
@pytest.mark.parametrize("after", ["I look.", f"Or {marked(CALL)} again.", "</tool_call>"])
@pytest.mark.parametrize("reason", [FinishReason.END, FinishReason.LENGTH])
async def test_call_may_precede_content(
    call: str, after: str, reason: FinishReason, writing_store: Path
) -> None:
    text = f"{marked(call)} {after}"
    for pieces in (letters(text), (text,)):
        harness = script_text(writing_store, *pieces, reason=reason)
        (choice,) = (await harness.post(CHAT, TOOLS)).json()["choices"]
        events = [event["choices"][0] for event in await harness.events(CHAT, TOOLS)]
        content = "".join(event["delta"].get("content") or "" for event in events)
        assert content == choice["message"]["content"] == after
        (streamed,) = (e["delta"]["tool_calls"] for e in events if "tool_calls" in e["delta"])
        for (called,) in (choice["message"]["tool_calls"], streamed):
            assert called["function"]["name"] == "weather"
            assert json.loads(called["function"]["arguments"]) == {"city": "Rome"}
        assert events[-1]["finish_reason"] == choice["finish_reason"] == "tool_calls"


async def test_calls_may_surround_content(writing_store: Path) -> None:
    text = f"{marked(CALL)} and {marked(CALL)}"
    (choice,) = (await script_text(writing_store, text).post(CHAT, TOOLS)).json()["choices"]
    assert choice["message"]["content"] == "and"
    assert len(choice["message"]["tool_calls"]) == 2
