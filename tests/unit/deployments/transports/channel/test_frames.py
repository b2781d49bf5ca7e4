from __future__ import annotations

import random

import pytest

from deployments.transports.channel.frames import (
    MAX_BODY_BYTES,
    MAX_HANDSHAKE_BYTES,
    ChannelError,
    Frame,
    FrameParser,
    FrameType,
    Method,
    decode_answer,
    decode_call,
    encode_answer,
    encode_call,
    encode_frame,
)

FRAMES = [
    Frame(FrameType.CALL, 1, b""),
    Frame(FrameType.EVENT, 1 << 63, b"x"),
    Frame(FrameType.ANSWER, 7, bytes(range(200))),
    Frame(FrameType.PING, 0, b""),
]
BYTES = b"".join(b"".join(encode_frame(FrameType(f.type), f.id, f.body)) for f in FRAMES)


def test_parser_returns_the_frames_at_every_split_in_two() -> None:
    for split in range(len(BYTES) + 1):
        parser = FrameParser()
        assert [*parser.feed(BYTES[:split]), *parser.feed(BYTES[split:])] == FRAMES


@pytest.mark.parametrize("size", [1, 2, 3, 12, 13, 14])
def test_parser_returns_the_frames_in_pieces_of_any_size(size: int) -> None:
    parser = FrameParser()
    pieces = [BYTES[start : start + size] for start in range(0, len(BYTES), size)]
    assert [frame for piece in pieces for frame in parser.feed(piece)] == FRAMES


def test_parser_returns_random_frames_at_random_splits() -> None:
    rng = random.Random(0)
    for _ in range(50):
        sent = [
            Frame(FrameType.EVENT, rng.getrandbits(64), rng.randbytes(rng.choice([0, 5, 255])))
            for _ in range(20)
        ]
        data = b"".join(b"".join(encode_frame(FrameType.EVENT, f.id, f.body)) for f in sent)
        parser, received = FrameParser(), []
        while data:
            size = rng.randint(1, 400)
            received += parser.feed(data[:size])
            data = data[size:]
        assert received == sent


def test_parser_rejects_a_length_above_the_limit_before_the_body_arrives() -> None:
    header = encode_frame(FrameType.HELLO, 0, bytes(MAX_HANDSHAKE_BYTES + 1))[0]
    with pytest.raises(ChannelError, match="257 bytes; the maximum is 256"):
        list(FrameParser().feed(bytes(header)))


def test_a_raised_limit_holds_for_the_frames_that_arrived_together() -> None:
    long = Frame(FrameType.MODELS, 0, bytes(MAX_HANDSHAKE_BYTES + 1))
    together = [*encode_frame(FrameType.READY, 0), *encode_frame(FrameType.MODELS, 0, long.body)]
    parser = FrameParser()
    frames = parser.feed(b"".join(together))
    assert next(frames).type == FrameType.READY
    parser.max_body_bytes = MAX_BODY_BYTES
    assert list(frames) == [long]


def test_a_frame_of_parts_has_their_total_length() -> None:
    (frame,) = FrameParser().feed(b"".join(encode_frame(FrameType.CALL, 3, b"ab", b"cd")))
    assert frame == Frame(FrameType.CALL, 3, b"abcd")


def test_a_frame_has_no_empty_buffer() -> None:
    """asyncio's `writelines` would wait for ever to send it."""
    assert len(encode_frame(FrameType.CALL, 3, b"ab", b"", memoryview(b""))) == 2


def test_call_and_answer_headers_round_trip() -> None:
    call = decode_call(encode_call(Method.INFER, 1.5, 40, 7) + b"message")
    assert call[:4] == (Method.INFER, 1500, 40, 7)
    assert bytes(call.message) == b"message"
    answer = decode_answer(encode_answer(1, 2, 3) + b"answer")
    assert (*answer[:3], bytes(answer.message)) == (1, 2, 3, b"answer")


def test_a_passed_deadline_and_a_huge_cost_stay_in_range() -> None:
    call = decode_call(encode_call(Method.INFER, -1.0, 1 << 40, 1 << 40))
    assert call[1:4] == (0, (1 << 32) - 1, (1 << 32) - 1)


def test_a_short_header_is_rejected() -> None:
    with pytest.raises(ChannelError, match="no complete header"):
        decode_call(b"\x01")
