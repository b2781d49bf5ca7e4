"""A hostile request: bytes on the wire.

Whole HTTP/1.1 requests, because client libraries mend what should arrive broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The status of a connection that the server closed without an answer.
CLOSED = 0
REFUSED = frozenset({400, 404, 413, 415, 422, CLOSED})


@dataclass(frozen=True, slots=True)
class Attack:
    """One request; `stalls` when it ends in the middle and the connection stays open."""

    name: str
    raw: bytes
    statuses: frozenset[int]  # one of these is right
    stalls: bool = False


def request(
    method: str, path: str, body: bytes = b"", headers: Sequence[str] = (), *, length: str = ""
) -> bytes:
    """A request after which the server closes; `length` in place of the body's own."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: close",
        f"Content-Length: {length or len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A POST."""
    return request("POST", path, body, headers)


def chunked(path: str, chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """A POST in chunks, written out."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + end
