"""Streams of `/v1/messages`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.errors import EngineFailed, InputTooLong
from deployments.messages import FinishReason
from tests.support.chat_harness import ChatHarness
from tests.support.decoder_artifacts import DECODER
from tests.support.generators import COMPUTE_TYPE
from tests.support.messages_harness import (
    CALL,
    MESSAGES,
    MESSAGES_BODY,
    WEATHER,
    script_messages,
    stream_messages,
)

TOOLS = {**MESSAGES_BODY, "tools": [WEATHER]}


def join_blocks(events: list[Any]) -> list[Any]:
    """Apply the deltas of each block to it. Assert that blocks are started and stopped in order."""
    blocks: list[Any] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open
            delta = dict(event["delta"])
            blocks[event["index"]].setdefault("deltas", []).append(delta.pop("type"))
            ((key, added),) = delta.items()
            blocks[event["index"]][key] = blocks[event["index"]].get(key, "") + added
        elif event["type"] == "content_block_stop":
            assert event["index"] == len(blocks) - 1
            is_open = False
    assert not is_open
    return blocks


async def test_stream_has_the_events_of_one_text(writing_store: Path) -> None:
    start, *events, end, stop = await stream_messages(script_messages(writing_store), MESSAGES_BODY)
    usage = {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1}
    message = start["message"]
    assert message.pop("id").startswith("msg_")
    assert start == {
        "type": "message_start",
        "message": {
            "type": "message",
            "role": "assistant",
            "model": DECODER,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage, "output_tokens": 0},
        },
    }

    def text(added: str) -> dict[str, Any]:
        delta = {"type": "text_delta", "text": added}
        return {"type": "content_block_delta", "index": 0, "delta": delta}

    empty = {"type": "text", "text": ""}
    assert events == [
        {"type": "content_block_start", "index": 0, "content_block": empty},
        text("Hel"),
        text("lo"),
        {"type": "content_block_stop", "index": 0},
    ]
    assert end == {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {**usage, "output_tokens": 3},
    }
    assert stop == {"type": "message_stop"}


async def test_headers_are_those_of_a_stream(writing_store: Path) -> None:
    body = {**MESSAGES_BODY, "stream": True}
    response = await script_messages(writing_store).post(MESSAGES, body)
    assert response.headers["x-compute-type"] == COMPUTE_TYPE


@pytest.mark.parametrize(
    "text", [CALL, f"See:<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"]
)
async def test_stream_has_the_blocks_of_the_whole_answer(text: str, writing_store: Path) -> None:
    harness = script_messages(writing_store, *text, reasoning=("Hm", "m."))
    whole = (await harness.post(MESSAGES, TOOLS)).json()
    events = await stream_messages(harness, TOOLS)
    blocks = join_blocks(events)
    for block in blocks:
        block.pop("deltas")
        if block["type"] == "tool_use":
            assert block.pop("input") == {}
            assert block.pop("partial_json") == '{"city": "Rome"}'
            block["input"] = {"city": "Rome"}
    for block in (*blocks, *whole["content"]):
        block.pop("id", None)
    assert blocks == whole["content"]
    assert len(blocks) >= 2
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
    assert events[-2]["usage"] == whole["usage"]


async def test_deltas_have_the_type_of_their_block(writing_store: Path) -> None:
    harness = script_messages(writing_store, f"See: <tool_call>{CALL}", reasoning=("Hm.",))
    blocks = join_blocks(await stream_messages(harness, TOOLS))
    assert [(block["type"], *block["deltas"]) for block in blocks] == [
        ("thinking", "thinking_delta"),
        ("text", "text_delta"),
        ("tool_use", "input_json_delta"),
    ]
    assert blocks[0]["signature"] == ""


async def test_stop_sequence_that_ended_the_stream_is_named(writing_store: Path) -> None:
    harness = script_messages(writing_store, reason=FinishReason.STOP, stop="###")
    *_, end, _stop = await stream_messages(harness, {**MESSAGES_BODY, "stop_sequences": ["###"]})
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "###"}


async def test_streamed_call_that_is_cut_short_has_an_empty_input(writing_store: Path) -> None:
    harness = script_messages(writing_store, CALL[:-4], reason=FinishReason.LENGTH)
    events = await stream_messages(harness, {**TOOLS, "tool_choice": {"type": "any"}})
    _, started, delta, stopped, end, _ = events
    assert started["content_block"]["name"] == "weather"
    assert delta["delta"] == {"type": "input_json_delta", "partial_json": "{}"}
    assert stopped["type"] == "content_block_stop"
    assert end["delta"]["stop_reason"] == "max_tokens"


async def test_failure_of_a_stream_is_its_last_event(writing_store: Path) -> None:
    harness = script_messages(writing_store, breaks=EngineFailed("broken"))
    *_, last = await stream_messages(harness, MESSAGES_BODY)
    assert last == {
        "type": "error",
        "error": {
            "type": "api_error",
            "message": "broken",
            "details": {"error_code": "engine_failed"},
        },
    }


async def test_refusal_before_the_stream_is_a_status(writing_store: Path) -> None:
    refusal = InputTooLong("`prompt` has 9 tokens", field="prompt")
    harness: ChatHarness = script_messages(writing_store, refusal=refusal)
    response = await harness.post(MESSAGES, {**MESSAGES_BODY, "stream": True})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("prompt is too long: `messages` has 9")
