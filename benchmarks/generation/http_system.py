"""Client of `/v1/completions` that records when each event of a stream arrives.

The client shares the cores with the server. During the timing it therefore only stores chunks of
the body and their arrival times. It parses the events after the end of the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import httptools
import orjson

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import Client, ServerAddress
from benchmarks.generation.streams import StreamRequest, StreamResult

PATH = "/v1/completions"
TIMEOUT_S = 120.0
_DONE = b"[DONE]"
_MAX_MESSAGE_CHARACTERS = 300  # maximum number of quoted characters of an error response


class BodyChunk(NamedTuple):
    """A part of a response body, and when it arrived (time.perf_counter)."""

    at_s: float
    data: bytes


class HttpGenerator:
    """Implementation of `TextGenerator` (streams.py) over HTTP, with one connection per stream."""

    def __init__(self, target: ServerAddress, model_id: str, version: str = "") -> None:
        self.version = version  # version of the served model
        self.model_id = model_id
        self._address = target

    @classmethod
    def connect(cls, url: str, model_id: str) -> HttpGenerator:
        """Ask the server at `url` for its version of the model. Return a generator.

        Raise BenchmarkError if the server does not serve the model.
        """
        target = ServerAddress.parse(url)
        with Client(target) as client:
            model = client.describe_model(model_id)
        return cls(target, model_id, str(model.get("version")))

    async def generate(self, request: StreamRequest) -> StreamResult:
        """Run one stream to its end.

        Raise BenchmarkError for an error response or an incomplete stream.
        """
        assert request.disconnect_after is None, "bug: no disconnects over HTTP"
        assert not request.prefix_cache_scope, "bug: no scopes over HTTP"
        assert not request.may_end_early, "bug: all answers over HTTP have the same length"
        raw = self._address.build_post(PATH, build_body(self.model_id, request))
        stream = _Stream(raw, request.first_token)
        submitted_s = time.perf_counter()
        await self._exchange(stream, PATH)
        if stream.status != 200:
            message = stream.body[:_MAX_MESSAGE_CHARACTERS].decode(errors="replace")
            raise self._failed(PATH, f"{stream.status}: {message}")
        return self._read(submitted_s, stream.chunks)

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a POST. Return status and body. Raises BenchmarkError if there is no response."""
        stream = _Stream(self._address.build_post(path, body))
        await self._exchange(stream, path)
        return stream.status, stream.body

    async def _exchange(self, stream: _Stream, path: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await loop.create_connection(lambda: stream, self._address.host, self._address.port)
                await stream.done
        except (OSError, TimeoutError) as exc:
            raise self._failed(path, f"{exc!r}") from exc
        finally:
            stream.close()

    def _read(self, submitted_s: float, chunks: Sequence[BodyChunk]) -> StreamResult:
        arrivals_s: list[float] = []
        texts: list[str] = []
        usage: dict[str, Any] | None = None
        for at_s, data in parse_events(chunks):
            event = orjson.loads(data)
            if "error" in event:
                raise self._failed(PATH, str(event["error"])[:_MAX_MESSAGE_CHARACTERS])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                arrivals_s.append(at_s)
                texts.append(choice["text"])
        if usage is None or not arrivals_s:
            raise self._failed(PATH, "a stream without its last event")
        details = usage.get("prompt_tokens_details") or {}
        return StreamResult(
            submitted_s=submitted_s,
            arrivals_s=tuple(arrivals_s),
            tokens=usage["completion_tokens"],
            text="".join(texts),
            cached_tokens=details.get("cached_tokens", 0),
        )

    def _failed(self, path: str, how: str) -> BenchmarkError:
        return BenchmarkError(
            f"`{path}` of {self._address.url} returned {how}", hint="see the server's log"
        )


def build_body(model_id: str, request: StreamRequest) -> bytes:
    return orjson.dumps(
        {
            "model": model_id,
            "prompt": list(request.prompt),
            "max_tokens": request.new_tokens,
            "min_tokens": request.new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def parse_events(chunks: Sequence[BodyChunk]) -> Iterator[tuple[float, bytes]]:
    """Yield the arrival time and the data of each event except `[DONE]`."""
    rest = b""
    for at_s, data in chunks:
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            content = event.partition(b"data: ")[2]
            if content and content != _DONE:
                yield at_s, content


class _Stream(asyncio.Protocol):
    """One request and its response. `done` is set at the end, `first_token` at the first chunk."""

    def __init__(self, raw: bytes, first_token: asyncio.Event | None = None) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.chunks: list[BodyChunk] = []
        self.status = 0
        self._raw = raw
        self._first_token = first_token
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    @property
    def body(self) -> bytes:
        return b"".join(chunk.data for chunk in self.chunks)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio.Transport, so isinstance would fail.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._raw)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._end(ConnectionError(f"not HTTP: {exc}"))

    def on_headers_complete(self) -> None:
        """Store the status. The parser calls this method."""
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Store a chunk of the body with its arrival time. The parser calls this method."""
        self.chunks.append(BodyChunk(time.perf_counter(), data))
        if self._first_token is not None:
            self._first_token.set()

    def on_message_complete(self) -> None:
        """End the exchange. The parser calls this method at the end of the response."""
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("the connection was closed"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: Exception | None = None) -> None:
        if self.done.done():
            return
        if why is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(why)
