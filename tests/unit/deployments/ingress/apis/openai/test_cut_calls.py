"""Optional calls in texts that end early. test_forced_calls.py has forced ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.messages import FinishReason
from tests.support.chat_harness import CHAT
from tests.unit.deployments.ingress.apis.openai.test_forced_calls import CUT_CALLS
from tests.unit.deployments.ingress.apis.openai.test_tool_calls import (
    CALL,
    TOOLS,
    letters,
    script_text,
)

CUT, CUT_ARGUMENTS = '{"name": "weather", "arguments": {"city": "Ro', '{"city": "Ro'


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        *((text, None, [arguments]) for text, arguments in CUT_CALLS),
        (CUT.replace("arguments", "parameters"), None, [CUT_ARGUMENTS]),
        (f"\n<tool_call>\n{CUT}", None, [CUT_ARGUMENTS]),
        (f"I look.\n<tool_call>{CUT}", "I look.", [CUT_ARGUMENTS]),
        (
            f"<tool_call>{CALL}</tool_call>\n<tool_call>{CUT}",
            None,
            ['{"city": "Rome"}', CUT_ARGUMENTS],
        ),
    ],
)
@pytest.mark.parametrize(
    ("reason", "finish"), [(FinishReason.LENGTH, "length"), (FinishReason.STOP, "stop")]
)
async def test_cut_call_has_the_start_of_its_arguments(
    text: str,
    content: str | None,
    arguments: list[str],
    reason: FinishReason,
    finish: str,
    writing_store: Path,
) -> None:
    harness = script_text(writing_store, *letters(text), reason=reason)
    (full,) = (await harness.post(CHAT, TOOLS)).json()["choices"]
    choices = [event["choices"][0] for event in await harness.events(CHAT, TOOLS)]
    *deltas, called, last = [choice["delta"] for choice in choices]
    assert full["message"]["content"] == content
    assert "".join(delta["content"] for delta in deltas) == (content or "")
    for message in (full["message"], called):
        calls = [call["function"] for call in message["tool_calls"]]
        assert calls == [{"name": "weather", "arguments": each} for each in arguments]
    assert (last, choices[-1]["finish_reason"], full["finish_reason"]) == ({}, finish, finish)


@pytest.mark.parametrize("rest", ["<", "</tool", "</tool_call>"])
async def test_call_whose_mark_is_cut_is_complete(rest: str, writing_store: Path) -> None:
    text = f"<tool_call>{CALL}{rest}"
    harness = script_text(writing_store, *letters(text), reason=FinishReason.LENGTH)
    (full,) = (await harness.post(CHAT, TOOLS)).json()["choices"]
    *_, called, last = [event["choices"][0] for event in await harness.events(CHAT, TOOLS)]
    assert full["finish_reason"] == last["finish_reason"] == "tool_calls"
    for message in (full["message"], called["delta"]):
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}


@pytest.mark.parametrize(
    "text",
    [
        "It rains",
        '{"name": "weath',
        '<tool_call>{"name": "',
        '{"name": "weather", "arguments": "{',
        '{"name": "weather", bad',
        f"[{CALL}, {CUT}",
        f"{CALL} was",
        f"<tool_call>{CALL[:-1]}</tool_call>, I call",
        f"<tool_call>{CALL[:-1]}</tool_call>",
        f"So <tool_call>{CALL}</tool_call> I",
    ],
)
async def test_other_text_that_is_cut_stays_text(text: str, writing_store: Path) -> None:
    harness = script_text(writing_store, *letters(text), reason=FinishReason.LENGTH)
    (full,) = (await harness.post(CHAT, TOOLS)).json()["choices"]
    deltas = [event["choices"][0]["delta"] for event in await harness.events(CHAT, TOOLS)]
    assert full["message"] == {"role": "assistant", "content": text}
    assert full["finish_reason"] == "length"
    assert "".join(delta.get("content", "") for delta in deltas) == text
