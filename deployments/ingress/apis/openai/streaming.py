"""Streams of OpenAI's generation API: chunks, usage, errors and the end marker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import orjson

from deployments.errors import ServeError
from deployments.ingress.apis.openai.responses import build_timings, build_usage
from deployments.ingress.apis.openai.schemas import ResponseIdentity
from deployments.ingress.apis.shared.openai_error import build_openai_error
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.http.sse import build_event
from deployments.messages import Chunk

DONE = build_event(b"[DONE]")


class StreamChoice(Protocol):
    """One choice of a stream. Each object that it yields fills `choices` of one chunk."""

    def open(self) -> Iterator[Mapping[str, Any]]:
        """Yield the objects that precede the first token."""
        ...

    def add_chunk(self, chunk: Chunk) -> Iterator[Mapping[str, Any]]:
        """Yield the objects that are complete after `chunk`."""
        ...


async def encode_stream(
    stream: GenerationStream,
    identity: ResponseIdentity,
    choices: Sequence[StreamChoice],
    *,
    choices_per_prompt: int,
    includes_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Yield an event per object of a choice, then the usage if requested, then `[DONE]`.

    Events that are ready at the same time are yielded as one piece of bytes.
    """
    # As in OpenAI's streams, `usage` is null in all chunks except the one that has the usage.
    usage = {"usage": None} if includes_usage else {}

    def encode(objects: Iterable[Mapping[str, Any]]) -> bytes:
        chunks = ({**identity, "choices": [choice], **usage} for choice in objects)
        return b"".join(build_event(orjson.dumps(chunk)) for chunk in chunks)

    if events := encode(opening for choice in choices for opening in choice.open()):
        yield events
    async for parts in stream.batches():
        objects = (built for part in parts for built in choices[part.choice].add_chunk(part.chunk))
        if events := encode(objects):
            yield events
    if includes_usage:
        total = build_usage(stream.started, stream.finished, choices_per_prompt)
        timings = build_timings(stream.finished)
        last = {**identity, "choices": [], "usage": total, "timings": timings}
        yield build_event(orjson.dumps(last))
    yield DONE


def encode_error(error: ServeError) -> bytes:
    """Encode an error as the last event of a stream."""
    return build_event(orjson.dumps({"error": build_openai_error(error, for_generation=True)}))
