"""Answers of a running server: `/v1/completions` as events, and when each of them came.

As light as the load generator, for the same reason: what it takes, the server does not get. While
the clock runs nothing is done but note when bytes came; they are read after the stream's end.
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
_MOST_TOLD = 300  # characters of an answer that is none


class BodyChunk(NamedTuple):
    """Bytes of a body, and when they came."""

    at_s: float
    data: bytes


class HttpGenerator:
    """A TextGenerator over HTTP; every stream has a connection of its own."""

    def __init__(self, target: ServerAddress, model_id: str, version: str = "") -> None:
        self.version = version  # of the model, as the server says
        self.model_id = model_id
        self._target = target

    @classmethod
    def found(cls, url: str, model_id: str) -> HttpGenerator:
        """The one at `url`. Raises BenchmarkError when nothing there serves the model."""
        target = ServerAddress.parse(url)
        with Client(target) as client:
            described = client.describe_model(model_id)
        return cls(target, model_id, str(described.get("version")))

    async def answer(self, ask: StreamRequest) -> StreamResult:
        """One stream to its end, or until it has told as much as its reader wants.

        Raises BenchmarkError for anything but that.
        """
        stream = _Stream(self._target.build_post(PATH, body_of(self.model_id, ask)), ask)
        submitted_s = time.perf_counter()
        await self._follow(stream, PATH)
        if stream.status != 200:
            told = stream.body[:_MOST_TOLD].decode(errors="replace")
            raise self._failed(PATH, f"{stream.status}: {told}")
        return self._read(submitted_s, stream.pieces, is_whole=ask.disconnect_after is None)

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer that comes as a whole.

        Raises BenchmarkError when none comes.
        """
        stream = _Stream(self._target.build_post(path, body))
        await self._follow(stream, path)
        return stream.status, stream.body

    async def _follow(self, stream: _Stream, path: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await loop.create_connection(lambda: stream, self._target.host, self._target.port)
                await stream.done
        except (OSError, TimeoutError) as exc:
            raise self._failed(path, f"{exc!r}") from exc
        finally:
            stream.close()

    def _read(
        self, submitted_s: float, pieces: Sequence[BodyChunk], *, is_whole: bool
    ) -> StreamResult:
        arrivals_s: list[float] = []
        texts: list[str] = []
        usage: dict[str, Any] | None = None
        for at_s, data in parse_events(pieces):
            told = orjson.loads(data)
            if "error" in told:
                raise self._failed(PATH, str(told["error"])[:_MOST_TOLD])
            usage = told.get("usage") or usage
            for choice in told["choices"]:
                arrivals_s.append(at_s)
                texts.append(choice["text"])
        if is_whole and (usage is None or not arrivals_s):
            raise self._failed(PATH, "a stream without its end")
        details = (usage or {}).get("prompt_tokens_details") or {}
        return StreamResult(
            submitted_s=submitted_s,
            arrivals_s=tuple(arrivals_s),
            tokens=usage["completion_tokens"] if usage else len(arrivals_s),
            text="".join(texts),
            cached_tokens=details.get("cached_tokens", 0),
        )

    def _failed(self, path: str, how: str) -> BenchmarkError:
        return BenchmarkError(
            f"`{path}` of {self._target.url} answered {how}", hint="look into the server's log"
        )


def body_of(model_id: str, ask: StreamRequest) -> bytes:
    """The question as JSON."""
    return orjson.dumps(
        {
            "model": model_id,
            "prompt": list(ask.prompt),
            "max_tokens": ask.new_tokens,
            "min_tokens": ask.new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def parse_events(pieces: Sequence[BodyChunk]) -> Iterator[tuple[float, bytes]]:
    """The data of each event but the last, and when it was whole."""
    rest = b""
    for at_s, data in pieces:
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            told = event.partition(b"data: ")[2]
            if told and told != _DONE:
                yield at_s, told


class _Stream(asyncio.Protocol):
    """One request and its answer. `done` is set when nothing more is to come, or is wanted."""

    def __init__(self, request: bytes, ask: StreamRequest | None = None) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pieces: list[BodyChunk] = []
        self.status = 0
        self._request = request
        self._begun = ask.begun if ask else None
        self._leaves_after = ask.disconnect_after if ask else None
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    @property
    def body(self) -> bytes:
        """All that came behind the head."""
        return b"".join(piece.data for piece in self.pieces)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A promise, not a check: uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._end(ConnectionError(f"not HTTP: {exc}"))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Called by the parser for each chunk of a body."""
        self.pieces.append(BodyChunk(time.perf_counter(), data))
        if self._begun is not None:
            self._begun.set()
        if len(self.pieces) == self._leaves_after:
            self._end()

    def on_message_complete(self) -> None:
        """Called by the parser at the end of the answer."""
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("the connection was closed"))

    def close(self) -> None:
        """Leave, whatever is still to come."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: Exception | None = None) -> None:
        if self.done.done():
            return
        if why is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(why)
