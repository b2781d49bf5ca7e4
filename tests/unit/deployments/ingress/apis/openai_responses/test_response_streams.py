"""Streams of the Responses API: their events, and their failures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deployments.errors import DeadlineExceeded, EngineFailed, InvalidField, Overloaded
from deployments.messages import FinishReason
from tests.support.chat_harness import ChatHarness
from tests.support.generators import ScriptedReply
from tests.support.responses_harness import (
    CALL,
    QUESTION,
    RESPONSES,
    WEATHER,
    respond,
    script_responses,
    stream_events,
    typed_events_in,
)

STARTED = ["response.created", "response.in_progress"]
MESSAGE_STARTED = ["response.output_item.added", "response.content_part.added"]
MESSAGE_DONE = ["response.output_text.done", "response.content_part.done"]
ITEM_DONE = "response.output_item.done"
CALL_SENT = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    ITEM_DONE,
]


def types_of(events: list[Any]) -> list[str]:
    return [event["type"] for event in events]


def without_ids(value: Any) -> Any:
    """Drop ids and times, which differ between responses."""
    random = ("id", "call_id", "created_at", "completed_at")
    if isinstance(value, dict):
        return {key: without_ids(each) for key, each in value.items() if key not in random}
    return list(map(without_ids, value)) if isinstance(value, list) else value


async def test_events_announce_the_message_and_its_text(writing_store: Path) -> None:
    events = await stream_events(script_responses(writing_store), QUESTION)
    assert types_of(events) == [
        *STARTED,
        *MESSAGE_STARTED,
        "response.output_text.delta",
        "response.output_text.delta",
        *MESSAGE_DONE,
        ITEM_DONE,
        "response.completed",
    ]
    created, added, last = events[0]["response"], events[2], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert [event["delta"] for event in events[4:6]] == ["Hel", "lo"]
    assert events[6]["text"] == events[7]["part"]["text"] == "Hello"
    assert {event["item_id"] for event in events[3:8]} == {added["item"]["id"]}
    assert events[8]["item"] == last["output"][0]
    assert last["id"] == created["id"]
    assert last["usage"]["total_tokens"] == 7


ANSWERS: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "text": ({}, (), {}),
    "empty": ({}, ("",), {}),
    "cut": ({}, (), {"reason": FinishReason.LENGTH}),
    "reasoning": ({}, (), {"reasoning": (" Let", " me\n", "\n", "see. \n")}),
    "cut reasoning": ({}, ("",), {"reasoning": ("Hm",), "reason": FinishReason.LENGTH}),
    "call": ({"tools": [WEATHER]}, tuple(CALL), {"reasoning": ("Hm",)}),
    "calls": (
        {"tools": [WEATHER]},
        ("I look.", *f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"),
        {},
    ),
    "blanks before a call": (
        {"tools": [WEATHER], "top_logprobs": 1},
        ("I look.", "\n\n", f"<tool_call>{CALL}</tool_call>"),
        {},
    ),
    "text and mark in one piece": (
        {"tools": [WEATHER], "top_logprobs": 1},
        ("I ", "look", ".\n<tool_", f"call>{CALL}</tool_call>"),
        {},
    ),
    "call cut by a stop string": (
        {"tools": [WEATHER], "tool_choice": "required"},
        tuple(CALL[:-4]),
        {"reason": FinishReason.STOP},
    ),
    "cut call": (
        {"tools": [WEATHER], "tool_choice": "required"},
        tuple(CALL[:-4]),
        {"reason": FinishReason.LENGTH},
    ),
    "call and cut call": (
        {"tools": [WEATHER]},
        ("I look.", *f"<tool_call>{CALL}</tool_call><tool_call>{CALL[:-4]}"),
        {"reason": FinishReason.LENGTH},
    ),
    "logprobs": ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, (), {}),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_stream_ends_with_the_whole_response(name: str, writing_store: Path) -> None:
    sent, pieces, reply = ANSWERS[name]
    harness = script_responses(writing_store, *pieces, **reply)
    body = {**QUESTION, **sent}
    whole = await respond(harness, body)
    events = await stream_events(harness, body)
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    done = [event for event in events if event["type"] == ITEM_DONE]
    assert [event["item"] for event in done] == events[-1]["response"]["output"]
    assert [event["output_index"] for event in done] == list(range(len(done)))
    for event in done:
        deltas = "".join(
            each["delta"]
            for each in events
            if each["type"].endswith(".delta") and each["item_id"] == event["item"]["id"]
        )
        item = event["item"]
        assert deltas == (item["arguments"] if "arguments" in item else item["content"][0]["text"])


async def test_call_follows_the_reasoning_as_an_item_of_its_own(writing_store: Path) -> None:
    harness = script_responses(writing_store, *CALL, reasoning=("Hm",))
    events = await stream_events(harness, {**QUESTION, "tools": [WEATHER]})
    assert types_of(events) == [
        *STARTED,
        *MESSAGE_STARTED,
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        ITEM_DONE,
        *CALL_SENT,
        "response.completed",
    ]
    added = events[8]["item"]
    assert (added["status"], added["name"], added["arguments"]) == ("in_progress", "weather", "")
    assert events[10]["arguments"] == '{"city": "Rome"}'


async def test_deltas_have_the_logprobs_of_their_tokens(writing_store: Path) -> None:
    sent = {**QUESTION, "include": ["message.output_text.logprobs"]}
    events = await stream_events(script_responses(writing_store), sent)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    tokens = [[token["token"] for token in event["logprobs"]] for event in deltas]
    assert tokens == [["Hel"], ["lo"]]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (EngineFailed("broken"), "server_error"),
        (Overloaded("full"), "rate_limit_exceeded"),
        (InvalidField("`grammar` is bad", field="grammar"), "invalid_prompt"),
    ],
)
async def test_failure_ends_the_stream(failure: Any, code: str, writing_store: Path) -> None:
    harness = script_responses(writing_store, breaks=failure)
    *_, error, failed = await stream_events(harness, QUESTION)
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert error["code"] == failure.code
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": error["message"]}
    if failure.field:
        assert (error["param"], error["message"]) == ("text.format", "`text.format` is bad")


async def test_failure_before_the_stream_has_a_status(writing_store: Path) -> None:
    harness = script_responses(writing_store, refusal=DeadlineExceeded("late"))
    reply = await harness.post(RESPONSES, {**QUESTION, "stream": True})
    assert reply.status_code == 504
    assert reply.headers["x-should-retry"] == "false"


async def test_late_failure_follows_the_start_of_a_response(
    writing_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.ingress.http.sse.KEEP_ALIVE_S", 0.0)
    monkeypatch.setattr("deployments.ingress.http.sse.COMMENT", b"")
    harness = ChatHarness(writing_store, lambda call: ScriptedReply(refusal=EngineFailed("broken")))
    async with asyncio.timeout(30):
        reply = await harness.post(RESPONSES, {**QUESTION, "stream": True})
    assert types_of(typed_events_in(reply)) == [*STARTED, "error", "response.failed"]
