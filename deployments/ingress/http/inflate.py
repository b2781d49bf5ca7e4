"""Compressed bodies, inflated no further than a body may be long."""

from __future__ import annotations

import zlib
from typing import Protocol

from deployments.errors import MalformedBody, UnsupportedEncoding

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


class Plain:
    """A body that is not compressed."""

    def feed(self, chunk: bytes, room: int) -> bytes:
        """The chunk itself."""
        return chunk

    def finish(self) -> None:
        """HTTP told the end."""


class Inflater:
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
        return Plain()
    if name in ("gzip", "x-gzip"):
        return Inflater(GZIP_WINDOW)
    if name == "deflate":
        return Inflater(None)
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
