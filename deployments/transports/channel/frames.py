"""Frames: little-endian u32 body length, u8 type, u64 id, then the body.

The id belongs to one call on one connection. Bodies of CALL, ANSWER and ERROR start with a fixed
header.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

Buffer = bytes | memoryview

# Differs from the last release if the bytes on the wire do. test_wire_version.py compares a
# fingerprint of all messages, and says when to raise it.
WIRE_VERSION = 10
MAX_HANDSHAKE_BYTES = 256
# Equal to RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH. A micro-batch of 32 calls fits, because a call
# with a long document in windows takes up to 27 MB.
MAX_BODY_BYTES = 1 << 30
MAX_U32 = (1 << 32) - 1

_FRAME = struct.Struct("<IBQ")
_CALL = struct.Struct("<BIII")
_ANSWER = struct.Struct("<III")
_COUNT = struct.Struct("<I")


class ChannelError(Exception):
    """The peer sent bytes of another format. A broken frame or header closes the connection."""


class FrameType(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    READY = 4
    CALL = 5
    ANSWER = 6  # ends a unary call or a stream; holds the stream's last event if it knew that
    ERROR = 7  # ends a unary call or a stream
    EVENT = 8  # one step of a stream
    RENEW = 9  # the client has read this many more events
    CANCEL = 10
    PING = 11
    PONG = 12
    GOAWAY = 13  # the replica drains: no new calls
    MODELS = 14  # names of models loaded (+) or evicted (-) since the last such frame


class Frame(NamedTuple):
    type: int
    id: int
    body: bytes


class Method(IntEnum):
    TOKENIZE_BATCH = 1
    INFER = 2
    TOKENIZE = 3
    DECODE = 4
    COMPLETE = 5
    STREAM = 6
    TOKENIZE_AND_INFER = 7  # the encoder also tokenizes
    MANAGE_POOL = 8  # every kind of replica has this method
    TOKENIZE_PROMPT = 9


class CallFrame(NamedTuple):
    """Body of a CALL. The deadline is sent as remaining time, because clocks of nodes differ."""

    method: int
    remaining_ms: int
    cost: int  # in the unit of the replica's load: characters or tokens
    backlog: int  # this replica's share of the cost of the calls that wait in the client process
    message: memoryview


class AnswerFrame(NamedTuple):
    """Body of an ANSWER or an ERROR. In an ERROR, `message` is the encoded error."""

    other_load: int  # cost of the calls in progress on other connections
    window: int  # limit of the cost in progress on this connection
    cost: int  # cost, such as tokens, of a later call that forwards this message; else 0
    message: memoryview


def encode_frame(kind: FrameType, id: int = 0, *parts: Buffer) -> tuple[Buffer, ...]:
    """Return the frame as buffers to write, without empty ones; the parts are not copied."""
    # With an empty last part, asyncio's `writelines` never ends since Python 3.12.
    return (_FRAME.pack(sum(map(len, parts)), kind, id), *filter(len, parts))


def encode_call(method: Method, remaining_s: float, cost: int, backlog: int = 0) -> bytes:
    remaining_ms = min(max(int(remaining_s * 1000), 0), MAX_U32)
    return _CALL.pack(method, remaining_ms, min(cost, MAX_U32), min(backlog, MAX_U32))


def decode_call(body: bytes) -> CallFrame:
    """Decode the body of a CALL. Raises ChannelError if the body is too short."""
    method, remaining_ms, cost, backlog = _unpack(_CALL, body)
    return CallFrame(method, remaining_ms, cost, backlog, memoryview(body)[_CALL.size :])


def encode_answer(other_load: int, window: int, cost: int) -> bytes:
    return _ANSWER.pack(min(other_load, MAX_U32), min(window, MAX_U32), min(cost, MAX_U32))


def decode_answer(body: bytes) -> AnswerFrame:
    """Decode the body of an ANSWER or ERROR. Raises ChannelError if the body is too short."""
    other_load, window, cost = _unpack(_ANSWER, body)
    return AnswerFrame(other_load, window, cost, memoryview(body)[_ANSWER.size :])


def encode_count(count: int) -> bytes:
    return _COUNT.pack(count)


def decode_count(body: bytes) -> int:
    """Decode the body of a READY or RENEW. Raises ChannelError if the body is too short."""
    (count,) = _unpack(_COUNT, body)
    return count


def encode_models(names: Iterable[str], *, are_loaded: bool) -> bytes:
    sign = "+" if are_loaded else "-"
    return "\n".join(f"{sign}{name}" for name in names).encode()


def decode_models(body: bytes) -> list[tuple[str, bool]]:
    """Return each name, and whether the model is loaded. Raises ChannelError for a bad body."""
    try:
        lines = body.decode().split("\n") if body else []
    except UnicodeDecodeError as exc:
        raise ChannelError("names of models that are not UTF-8") from exc
    if any(line[:1] not in ("+", "-") for line in lines):
        raise ChannelError("a list of models without signs")
    return [(line[1:], line[0] == "+") for line in lines]


def _unpack(header: struct.Struct, body: bytes) -> tuple[int, ...]:
    try:
        return header.unpack_from(body)
    except struct.error as exc:
        raise ChannelError(f"a frame body of {len(body)} bytes has no complete header") from exc


class FrameParser:
    """Parser that cuts a byte stream into frames. It joins the parts of a long frame only once."""

    def __init__(self) -> None:
        self.max_body_bytes = MAX_HANDSHAKE_BYTES
        self._chunks: list[bytes] = []
        self._held = 0  # bytes in `_chunks`
        self._needed = _FRAME.size  # minimum of `_held` for the next frame to be complete

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes. Raises ChannelError for an oversized frame.

        A frame is parsed only after the caller has handled the previous frame. The caller increases
        `max_body_bytes` at the end of the handshake. The new limit thus applies to frames that
        arrive together with the last frame of the handshake.
        """
        self._chunks.append(data)
        self._held += len(data)
        if self._held < self._needed:
            return
        buffer = data if len(self._chunks) == 1 else b"".join(self._chunks)
        start = 0
        while True:
            self._needed = _FRAME.size
            if len(buffer) - start < _FRAME.size:
                break
            length, kind, id = _FRAME.unpack_from(buffer, start)
            if length > self.max_body_bytes:
                raise ChannelError(
                    f"a frame of {length} bytes; the maximum is {self.max_body_bytes}"
                )
            end = start + _FRAME.size + length
            if end > len(buffer):
                self._needed += length
                break
            yield Frame(kind, id, buffer[start + _FRAME.size : end])
            start = end
        self._chunks = [buffer[start:]] if start < len(buffer) else []
        self._held = len(buffer) - start
