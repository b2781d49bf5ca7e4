"""Bytes to JSON and back. Content-Type is ignored: curl and Triton's client send odd ones."""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.config import LimitSettings
from deployments.errors import (
    BodyTooLarge,
    BodyTooSlow,
    MalformedBody,
    Overloaded,
    UnsupportedEncoding,
)

GZIP_WINDOW = 16 + zlib.MAX_WBITS
ZLIB_WINDOW = zlib.MAX_WBITS
RAW_WINDOW = -zlib.MAX_WBITS


class Decoder(Protocol):
    """Turns what arrives into what was meant."""

    def feed(self, chunk: bytes, room: int) -> bytes:
        """What `chunk` stands for; beyond `room` bytes it need not go on. Raises MalformedBody."""
        ...

    def finish(self) -> None:
        """Raises MalformedBody when the end is missing."""
        ...


class IdentityDecoder:
    """A body that is not compressed."""

    def feed(self, chunk: bytes, room: int) -> bytes:
        """The chunk itself."""
        return chunk

    def finish(self) -> None:
        """HTTP told the end."""


class InflateDecoder:
    """One gzip or deflate stream. A second one behind it is refused: each costs memory anew."""

    def __init__(self, window: int | None) -> None:
        self._window = window  # None: told by the first bytes
        self._stream: zlib._Decompress | None = None

    def feed(self, chunk: bytes, room: int) -> bytes:
        """What `chunk` inflates to, at most one byte more than `room`. Raises MalformedBody."""
        if not chunk:
            return b""
        if self._stream is None:
            self._stream = zlib.decompressobj(self._window or deflate_window(chunk))
        try:
            plain = self._stream.decompress(chunk, room + 1)
        except zlib.error as exc:
            raise MalformedBody(f"the body cannot be inflated: {exc}", field="body") from exc
        if self._stream.unused_data:
            raise MalformedBody("the body goes on after its compressed stream", field="body")
        return plain

    def finish(self) -> None:
        """Raises MalformedBody when the stream has not come to its end."""
        if self._stream is None or not self._stream.eof:
            raise MalformedBody("the compressed body ended early", field="body")


def decoder_for(encoding: str) -> Decoder:
    """The decoder of a Content-Encoding header. Raises UnsupportedEncoding.

    Of several layers none is read: each multiplies what a small body can grow to.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return IdentityDecoder()
    if name in ("gzip", "x-gzip"):
        return InflateDecoder(GZIP_WINDOW)
    if name == "deflate":
        return InflateDecoder(None)
    raise UnsupportedEncoding(
        "this `content-encoding` is not read here; known: `gzip`, `deflate`, `identity`",
        field="content-encoding",
    )


def deflate_window(start: bytes) -> int:
    """Clients call two kinds of stream deflate: with a header, as the standard has it, and bare."""
    headed = start[0] & 0x0F == zlib.DEFLATED
    if headed and len(start) > 1:
        headed = int.from_bytes(start[:2]) % 31 == 0
    return ZLIB_WINDOW if headed else RAW_WINDOW


SCOPE_KEY = "hundredfold.body_account"


class BodyMemoryLimit:
    """Middleware that gives each request an account; what it holds is free when it is answered."""

    def __init__(self, app: ASGIApp, limits: Callable[[], LimitSettings]) -> None:
        self.held_bytes = 0
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its account."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        account = BodyReservation(self)
        try:
            scope[SCOPE_KEY] = account
            await self._app(scope, receive, send)
        finally:
            self.held_bytes -= account.held_bytes

    @property
    def limit_bytes(self) -> int:
        """What may be held at once, as configured now."""
        return self._limits().inflight_body_bytes


class BodyReservation:
    """What one request holds."""

    def __init__(self, accounts: BodyMemoryLimit) -> None:
        self.began_s = time.perf_counter()
        self.held_bytes = 0
        self._accounts = accounts

    def reserve(self, size: int) -> None:
        """Hold `size` bytes more. Raises Overloaded when all requests together hold too many."""
        if self._accounts.held_bytes + size > self._accounts.limit_bytes:
            raise Overloaded("too many bytes of requests are being worked on")
        self._accounts.held_bytes += size
        self.held_bytes += size


# No API here nests more than a handful; Python code that follows a value down must not overflow.
MAX_DEPTH = 32
# Objects and lists cost most: a million of them in two megabytes keep the interpreter for seconds.
MAX_CONTAINERS = 20_000
# Possessive, and with an end that may be missing: wherever a text begins there is a match, so the
# search takes linear time. Otherwise one that never ends is tried anew from every quote in it.
STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


async def read_json(request: Request, limits: LimitSettings) -> Any:
    """The body as JSON. Raises what `read_body` and `parse_json` raise."""
    return parse_json(await read_body(request, limits))


async def read_json_object(request: Request, limits: LimitSettings) -> dict[str, Any]:
    """The body as one JSON object. Raises what `read_json` raises, and MalformedBody."""
    value = await read_json(request, limits)
    if not isinstance(value, dict):
        raise MalformedBody("the body must be a JSON object", field="body")
    return value


def parse_json(raw: bytes) -> Any:
    """The value of strict JSON in UTF-8; of keys that are told twice the last one counts.

    Strict means: no NaN, no number beyond what a double holds, no half of a surrogate pair, nothing
    behind the value. Raises MalformedBody.
    """
    # Only bodies with many brackets are looked at closer: those in texts are none.
    brackets = opening_brackets(raw)
    if brackets > MAX_CONTAINERS and opening_brackets(STRINGS.sub(b"", raw)) > MAX_CONTAINERS:
        raise MalformedBody(
            f"the body has more than {MAX_CONTAINERS} objects and lists", field="body"
        )
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise MalformedBody(f"the body is not JSON in UTF-8: {exc}", field="body") from exc
    if brackets > MAX_DEPTH and deeper_than(value, MAX_DEPTH):
        raise MalformedBody(f"the body is nested more than {MAX_DEPTH} deep", field="body")
    return value


def opening_brackets(raw: bytes) -> int:
    """How many objects and lists begin, at most."""
    return raw.count(b"[") + raw.count(b"{")


def deeper_than(value: Any, depth: int) -> bool:
    """Whether objects and lists stand in each other more than `depth` deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        level = [
            child
            for one in level
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, dict | list)
        ]
    return bool(level)


async def read_body(request: Request, limits: LimitSettings) -> bytes:
    """The body's bytes, inflated where `content-encoding` says so.

    Raises BodyTooLarge, BodyTooSlow, MalformedBody, Overloaded or UnsupportedEncoding.
    """
    declared = request.headers.get("content-length", "")
    # Digits are counted first: Python refuses to read a number of thousands of them.
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limits.body_bytes):
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _collect(request, limits)
    except TimeoutError as exc:
        raise BodyTooSlow(
            f"the body took more than {limits.body_timeout_s:g} seconds", field="body"
        ) from exc
    except ClientDisconnect as exc:
        raise MalformedBody("the body ended early", field="body") from exc


async def _collect(request: Request, limits: LimitSettings) -> bytes:
    account: BodyReservation = request.scope[SCOPE_KEY]
    decoder = decoder_for(request.headers.get("content-encoding", ""))
    chunks: list[bytes] = []
    sent = size = 0
    async for chunk in request.stream():
        sent += len(chunk)
        plain = decoder.feed(chunk, limits.body_bytes - size)
        size += len(plain)
        # What is sent counts too: a compressed stream may go on and on without giving a byte.
        if max(sent, size) > limits.body_bytes:
            raise _too_large(limits)
        account.reserve(len(plain))
        chunks.append(plain)
    decoder.finish()
    return b"".join(chunks)


def _too_large(limits: LimitSettings) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has more than the {limits.body_bytes} bytes that are read", field="body"
    )


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Strict JSON; numpy arrays become lists without a detour through Python floats."""
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, dict(headers or {}), media_type="application/json")
