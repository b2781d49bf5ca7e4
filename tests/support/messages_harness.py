"""Requests of Anthropic's Messages API, and the events of its streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from tests.support.chat_harness import USER, ChatHarness
from tests.support.generators import ScriptedReply

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
MESSAGES_BODY = {"messages": [USER], "max_tokens": 50}
WEATHER = {
    "name": "weather",
    "description": "Of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'


def script_messages(store: Path, *pieces: str, **reply: Any) -> ChatHarness:
    """Return a harness whose generator writes `pieces`, by default `Hel` and `lo`."""
    scripted = ScriptedReply(pieces, **reply) if pieces else ScriptedReply(**reply)
    return ChatHarness(store, lambda call: scripted)


async def stream_messages(harness: ChatHarness, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream. Assert that each has its type as its name."""
    response = await harness.post(MESSAGES, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return named_events_in(response.content)


def named_events_in(body: bytes) -> list[Any]:
    *texts, rest = body.split(b"\n\n")
    assert rest == b""
    events = []
    for text in texts:
        name, data = text.split(b"\n")
        events.append(orjson.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + events[-1]["type"].encode()
    return events
