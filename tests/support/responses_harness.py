"""Requests of OpenAI's Responses API. Answers are checked with the types of OpenAI's client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import orjson
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.chat_harness import ChatHarness
from tests.support.generators import ScriptedReply

RESPONSES = "/v1/responses"
QUESTION = {"input": "What is a river?"}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "strict": True,
}
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def script_responses(store: Path, *pieces: str, **reply: Any) -> ChatHarness:
    """Return a harness whose generator writes `pieces`, by default `Hel` and `lo`."""
    scripted = ScriptedReply(pieces, **reply) if pieces else ScriptedReply(**reply)
    return ChatHarness(store, lambda call: scripted)


async def respond(harness: ChatHarness, body: dict[str, Any]) -> Any:
    """Return a whole response."""
    reply = await harness.post(RESPONSES, body)
    assert reply.status_code == 200, reply.text
    Response.model_validate(reply.json())
    return reply.json()


async def stream_events(harness: ChatHarness, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream."""
    reply = await harness.post(RESPONSES, {**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return typed_events_in(reply)


def typed_events_in(reply: httpx.Response) -> list[Any]:
    """Parse the events. Assert that their names are their types, and that they are numbered."""
    *texts, rest = reply.content.split(b"\n\n")
    assert rest == b""
    events = []
    for text in texts:
        name, data = text.split(b"\n")
        event = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        EVENTS.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events
