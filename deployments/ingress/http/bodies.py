"""Request bodies and JSON responses. Content-Type is ignored: clients send wrong values."""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from deployments.capacity import Capacity
from deployments.config import LimitSettings
from deployments.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ClientDisconnected,
    MalformedBody,
    UnsupportedEncoding,
)
from deployments.ingress.client_identity import current_client

GZIP_WINDOW = 16 + zlib.MAX_WBITS
ZLIB_WINDOW = zlib.MAX_WBITS
RAW_WINDOW = -zlib.MAX_WBITS


class ContentDecoder(Protocol):
    """Decoder of request bodies for one `content-encoding`."""

    def feed(self, chunk: bytes, max_bytes: int) -> bytes:
        """Decode `chunk`; output beyond `max_bytes` may be omitted. Raises MalformedBody."""
        ...

    def finish(self) -> None:
        """Raise MalformedBody if the end of the body is missing."""
        ...


class IdentityDecoder:
    """Decoder of a body that is not compressed."""

    def feed(self, chunk: bytes, max_bytes: int) -> bytes:
        return chunk

    def finish(self) -> None:
        """Do nothing: HTTP itself marks the end of the body."""


class InflateDecoder:
    """Decoder of one gzip or deflate stream.

    A body with a second stream is rejected, because each stream allocates memory again.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window  # None: detected from the first bytes
        self._stream: zlib._Decompress | None = None

    def feed(self, chunk: bytes, max_bytes: int) -> bytes:
        """Inflate `chunk` to at most `max_bytes` + 1 bytes. Raises MalformedBody."""
        if not chunk:
            return b""
        if self._stream is None:
            self._stream = zlib.decompressobj(self._window or detect_deflate_window(chunk))
        try:
            plain = self._stream.decompress(chunk, max_bytes + 1)
        except zlib.error as exc:
            raise MalformedBody(f"the body cannot be inflated: {exc}", field="body") from exc
        if self._stream.unused_data:
            raise MalformedBody("the body continues after its compressed stream", field="body")
        return plain

    def finish(self) -> None:
        if self._stream is None or not self._stream.eof:
            raise MalformedBody("the compressed body ended early", field="body")


def select_decoder(encoding: str, header: str = "content-encoding") -> ContentDecoder:
    """Select the decoder for the value of `header`. Raises UnsupportedEncoding.

    A list of several encodings is rejected: each multiplies the size to which a body can expand.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return IdentityDecoder()
    if name in ("gzip", "x-gzip"):
        return InflateDecoder(GZIP_WINDOW)
    if name == "deflate":
        return InflateDecoder(None)
    raise UnsupportedEncoding(
        f"this `{header}` is not supported; use `gzip`, `deflate` or `identity`", field=header
    )


def detect_deflate_window(start: bytes) -> int:
    """Return ZLIB_WINDOW, or RAW_WINDOW if `start` has no zlib header.

    The standard demands the header, but some clients omit it.
    """
    has_header = start[0] & 0x0F == zlib.DEFLATED
    if has_header and len(start) > 1:
        has_header = int.from_bytes(start[:2]) % 31 == 0
    return ZLIB_WINDOW if has_header else RAW_WINDOW


GRACE_S = 3.0  # seconds before `body_bytes_per_s` applies
RESERVATION_KEY = "hundredfold.body_reservation"
BODY_KEY = "hundredfold.body"  # the decoded body; a second run of the handler reads it


class BodyReservation:
    """The body bytes of one request, reserved until the request is answered."""

    def __init__(self, capacity: Capacity) -> None:
        self.started_s = time.perf_counter()
        self._capacity = capacity
        self._bytes = 0
        self._client = ""

    def reserve(self, size: int, client: str) -> None:
        """Reserve `size` further bytes for `client`, which must be the same in all calls.

        Raises Overloaded if the bytes exceed the capacity or the share of the client.
        """
        self._capacity.reserve(size, client, held=self._bytes)
        self._bytes += size
        self._client = client

    def release(self) -> None:
        self._capacity.release(self._bytes, self._client)


# Maximum levels of nesting, so that recursion over a value does not overflow the stack. Real bodies
# have a few levels.
MAX_DEPTH = 32
# Maximum number of objects and lists. Two megabytes can have a million of them. The parser then
# takes seconds, in which no other request makes progress.
MAX_CONTAINERS = 20_000
# JSON strings. The search takes linear time: possessive quantifiers do not backtrack. The closing
# quote is optional, so that an unterminated string matches too. Otherwise the search would restart
# at each quote in such a string.
STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


async def read_json(request: Request, limits: LimitSettings) -> Any:
    """Parse the body as JSON. Raises the errors of `read_body` and `parse_json`."""
    return parse_json(await read_body(request, limits))


async def read_json_object(request: Request, limits: LimitSettings) -> dict[str, Any]:
    """Parse the body as a JSON object. Raises the errors of `read_json`, and MalformedBody."""
    value = await read_json(request, limits)
    if not isinstance(value, dict):
        raise MalformedBody("the body must be a JSON object", field="body")
    return value


def parse_json(raw: bytes) -> Any:
    """Parse strict JSON in UTF-8. Of duplicate keys, the last one counts.

    Raises MalformedBody for invalid JSON, and for a value beyond MAX_CONTAINERS or MAX_DEPTH. NaN,
    a number beyond the range of a double, a lone surrogate and data after the value are invalid.
    """
    # The cheap count includes brackets inside strings. Count exactly only above the limit.
    brackets = count_brackets(raw)
    if brackets > MAX_CONTAINERS and count_brackets(STRINGS.sub(b"", raw)) > MAX_CONTAINERS:
        raise MalformedBody(
            f"the body has more than {MAX_CONTAINERS} objects and lists", field="body"
        )
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise MalformedBody(f"the body is not JSON in UTF-8: {exc}", field="body") from exc
    if brackets > MAX_DEPTH and is_deeper_than(value, MAX_DEPTH):
        raise MalformedBody(f"the body is nested deeper than {MAX_DEPTH} levels", field="body")
    return value


def count_brackets(raw: bytes) -> int:
    """Return an upper bound of the number of objects and lists."""
    return raw.count(b"[") + raw.count(b"{")


def is_deeper_than(value: Any, depth: int) -> bool:
    """Return whether objects and lists nest more than `depth` levels."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
    return bool(level)


async def read_body(request: Request, limits: LimitSettings) -> bytes:
    """Read the body and decode its `content-encoding`. Later calls return the same body again.

    Raises BodyTooLarge, BodyTooSlow, ClientDisconnected, MalformedBody, Overloaded or
    UnsupportedEncoding.
    """
    if (body := request.scope.get(BODY_KEY)) is not None:
        return bytes(body)
    declared = request.headers.get("content-length", "")
    # Count digits first: int() rejects strings of thousands of digits.
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limits.body_bytes):
        raise _body_too_large(limits)
    try:
        async with asyncio.timeout(limits.body_timeout_s) as timer:
            body = await _collect(request, limits, timer)
    except TimeoutError as exc:
        raise BodyTooSlow(
            f"the body took more than {limits.body_timeout_s:g} s to arrive, or less than "
            f"{limits.body_bytes_per_s} bytes arrived per second",
            field="body",
        ) from exc
    request.scope[BODY_KEY] = body
    return body


def replace_body(request: Request, body: bytes) -> None:
    """Keep `body`, decoded from the body that was read, in its place, and reserve its bytes too.

    Raises Overloaded.
    """
    reservation: BodyReservation = request.scope[RESERVATION_KEY]
    reservation.reserve(len(body), current_client())
    request.scope[BODY_KEY] = body


async def _collect(request: Request, limits: LimitSettings, timer: asyncio.Timeout) -> bytes:
    reservation: BodyReservation = request.scope[RESERVATION_KEY]
    client = current_client()
    decoder = select_decoder(request.headers.get("content-encoding", ""))
    chunks: list[bytes] = []
    received = size = 0
    more = True
    latest_s = timer.when() or 0.0
    grace_ends_s = latest_s - limits.body_timeout_s + GRACE_S
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the client left before the end of the body", field="body")
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        received += len(chunk)
        plain = decoder.feed(chunk, limits.body_bytes - size)
        size += len(plain)
        # Received bytes count too: a compressed stream may continue without any output.
        if max(received, size) > limits.body_bytes:
            raise _body_too_large(limits)
        reservation.reserve(len(plain), client)
        chunks.append(plain)
        if more:
            timer.reschedule(min(latest_s, grace_ends_s + received / limits.body_bytes_per_s))
    decoder.finish()
    return b"".join(chunks)


def _body_too_large(limits: LimitSettings) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has more than {limits.body_bytes} bytes. Split the request.", field="body"
    )


class JsonResponse(Response):
    """Response with a JSON body. It builds its headers faster than Starlette's Response does."""

    media_type = "application/json"

    def __init__(self, body: bytes, status: int, headers: Mapping[str, str]) -> None:
        self.status_code = status
        self.background = None
        self.body = body
        self.raw_headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *((name.encode("latin-1"), text.encode("latin-1")) for name, text in headers.items()),
        ]


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Build a response of strict JSON; orjson writes numpy arrays without making Python floats."""
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return JsonResponse(body, status, headers or {})
