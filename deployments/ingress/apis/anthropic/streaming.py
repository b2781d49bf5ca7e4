"""Streams of the Messages API, as named Server-Sent Events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence

import orjson

from deployments.errors import ServeError
from deployments.ingress.apis.anthropic.errors import build_anthropic_error
from deployments.ingress.apis.anthropic.responses import (
    OPEN_END,
    build_input,
    build_message,
    build_message_end,
    build_message_usage,
    build_tool_use,
)
from deployments.ingress.apis.anthropic.schemas import (
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Delta,
    Event,
    InputJsonDelta,
    MessageDelta,
    MessageStart,
    MessageStop,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
)
from deployments.ingress.apis.openai.chat import ChatStreamChoice, build_tool_call_parser
from deployments.ingress.apis.openai.schemas import ChatBody, ResponseToolCall
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.http.sse import build_named_event
from deployments.messages import Chunk


async def encode_message_stream(
    stream: GenerationStream, chat: ChatBody
) -> AsyncGenerator[bytes, None]:
    """Yield the events. Those that are ready at the same time are one piece of bytes."""
    message = StreamedMessage(stream, chat)
    yield encode_events([message.build_start()])
    async for parts in stream.batches():
        events = encode_events(event for part in parts for event in message.add_chunk(part.chunk))
        if events:
            yield events


def encode_events(events: Iterable[Event]) -> bytes:
    return b"".join(build_named_event(event["type"], orjson.dumps(event)) for event in events)


def encode_error(error: ServeError) -> bytes:
    """Encode an error as the last event of a stream."""
    return encode_events([build_anthropic_error(error)])


class StreamedMessage:
    """The events of a message. One content block after the other is started, sent and stopped."""

    def __init__(self, stream: GenerationStream, chat: ChatBody) -> None:
        self._model = stream.model
        (self._started,) = stream.started
        self._choice = ChatStreamChoice(0, build_tool_call_parser(chat), with_logprobs=False)
        self._index = -1  # of the last content block that was started
        self._open_block: str | None = None  # its type, until it is stopped

    def build_start(self) -> Event:
        usage = build_message_usage(self._started, ())
        message = build_message(self._model, [], OPEN_END, usage)
        return MessageStart(type="message_start", message=message)

    def add_chunk(self, chunk: Chunk) -> Iterator[Event]:
        calls: Sequence[ResponseToolCall] = ()
        for part in self._choice.add_chunk(chunk):
            delta = part["delta"]
            if reasoning := delta.get("reasoning_content"):
                yield from self._send(
                    ThinkingContent(type="thinking", thinking="", signature=""),
                    ThinkingDelta(type="thinking_delta", thinking=reasoning),
                )
            if text := delta.get("content"):
                yield from self._send(
                    TextContent(type="text", text=""), TextDelta(type="text_delta", text=text)
                )
            calls = delta.get("tool_calls", calls)
            finish_reason = part["finish_reason"]
            if finish_reason is None or chunk.finished is None:
                continue
            for call in calls:
                yield from self._send_call(call)
            yield from self._stop_block()
            yield MessageDelta(
                type="message_delta",
                delta=build_message_end(chunk.finished, finish_reason),
                usage=build_message_usage(self._started, [chunk.finished]),
            )
            yield MessageStop(type="message_stop")

    def _send_call(self, call: ResponseToolCall) -> Iterator[Event]:
        yield from self._stop_block()  # a call after another one
        written = build_input(call["function"]["arguments"])
        yield from self._send(
            {**build_tool_use(call), "input": {}},
            InputJsonDelta(type="input_json_delta", partial_json=written),
        )

    def _send(self, empty: ContentBlock, delta: Delta) -> Iterator[Event]:
        """Add `delta` to the open block; start the block `empty` first unless one of its type is.

        Stop the block of another type before.
        """
        if self._open_block != empty["type"]:
            yield from self._stop_block()
            self._index += 1
            self._open_block = empty["type"]
            yield ContentBlockStart(
                type="content_block_start", index=self._index, content_block=empty
            )
        yield ContentBlockDelta(type="content_block_delta", index=self._index, delta=delta)

    def _stop_block(self) -> Iterator[Event]:
        if self._open_block is not None:
            self._open_block = None
            yield ContentBlockStop(type="content_block_stop", index=self._index)
