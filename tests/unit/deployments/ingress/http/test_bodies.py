"""Body parsing: strict JSON, bounded decompression, limits of time and memory."""

from __future__ import annotations

import asyncio
import gzip
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.config import IngressUserConfig, LimitSettings
from deployments.errors import MalformedBody, UnsupportedEncoding
from deployments.ingress.http.bodies import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    InflateDecoder,
    is_deeper_than,
    parse_json,
    select_decoder,
)
from deployments.request_headers import ADDRESS_HEADER
from tests.support.artifacts import EMBEDDER
from tests.support.in_process import InProcess

EMBED = f"/models/{EMBEDDER}"
BODY = b'{"inputs": "night"}'


def gzip_fixed(content: bytes) -> bytes:
    """Compress without a time stamp, which would change the test id."""
    return gzip.compress(content, mtime=0)


LIMITS = IngressUserConfig(
    limits=LimitSettings(body_bytes=2_000, body_timeout_s=30, inflight_body_bytes=3_000)
)


def bare_deflate(plain: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(plain) + packer.flush()


def test_last_of_two_equal_keys_wins() -> None:
    assert parse_json(b'{"inputs": 7, "inputs": "a"}') == {"inputs": "a"}


@pytest.mark.parametrize(
    "raw", [b"1e999", b"1" + b"0" * 400, b"NaN", b'"\\ud800"', b"{} {}", b"[" * 5_000]
)
def test_invalid_json_is_malformed(raw: bytes) -> None:
    with pytest.raises(MalformedBody):
        parse_json(raw)


def test_nesting_depth_is_limited() -> None:
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_json(deepest)
    with pytest.raises(MalformedBody, match="nested deeper than"):
        parse_json(b"[" + deepest + b"]")
    with pytest.raises(MalformedBody, match="nested deeper than"):
        parse_json(b'{"a":' * 40 + b"1" + b"}" * 40)
    assert not is_deeper_than("text", 0)
    assert is_deeper_than([{}], 1)


def test_containers_are_counted_outside_strings_only() -> None:
    text = b'["' + b'[\\"{' * MAX_CONTAINERS + b'"]'
    assert len(parse_json(text)[0]) == 3 * MAX_CONTAINERS
    with pytest.raises(MalformedBody, match="objects and lists"):
        parse_json(b"[" + b"[]," * MAX_CONTAINERS + b"1]")


def test_unterminated_string_takes_linear_time() -> None:
    """A scan that restarts at each quote would take half an hour for these 400 KB."""
    started_s = time.thread_time()
    with pytest.raises(MalformedBody):
        parse_json(b"[" * (MAX_CONTAINERS + 1) + b'"' + b'\\"' * 200_000)
    assert time.thread_time() - started_s < 5


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip_fixed(BODY)),
        ("X-GZIP", gzip_fixed(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", bare_deflate(BODY)),
        ("identity", BODY),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1_000])
async def test_compressed_body_is_read_in_any_pieces(
    encoding: str, packed: bytes, step: int, tiny_store: Path
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(packed), step):
            yield packed[start : start + step]

    async with InProcess(tiny_store, settings=LIMITS).client() as http:
        plain = await http.post(EMBED, content=BODY)
        response = await http.post(EMBED, content=pieces(), headers={"content-encoding": encoding})
    assert (response.status_code, response.json()) == (200, plain.json())


@pytest.mark.parametrize(
    ("encoding", "content", "status", "code"),
    [
        ("gzip", gzip_fixed(b" " * 2_001), 413, "body_too_large"),
        ("deflate", zlib.compress(b" " * 1_000_000), 413, "body_too_large"),
        ("gzip", BODY, 400, "malformed_body"),
        ("gzip", b"", 400, "malformed_body"),
        ("gzip", gzip_fixed(BODY)[:-1], 400, "malformed_body"),
        ("gzip", gzip_fixed(BODY) + b"x", 400, "malformed_body"),
        ("gzip", gzip_fixed(BODY[:5]) + gzip_fixed(BODY[5:]), 400, "malformed_body"),
        ("br", BODY, 415, "unsupported_encoding"),
        ("gzip, gzip", gzip_fixed(gzip_fixed(BODY)), 415, "unsupported_encoding"),
    ],
)
async def test_invalid_compressed_body_is_rejected(
    encoding: str, content: bytes, status: int, code: str, tiny_store: Path
) -> None:
    async with InProcess(tiny_store, settings=LIMITS).client() as http:
        response = await http.post(EMBED, content=content, headers={"content-encoding": encoding})
    assert (response.status_code, response.json()["code"]) == (status, code)


async def test_compressed_body_without_output_is_limited(tiny_store: Path) -> None:
    async def empty_blocks() -> AsyncIterator[bytes]:
        yield zlib.compress(b"")[:2]
        for _ in range(5):
            yield b"\x00\x00\x00\xff\xff" * 100

    headers = {"content-encoding": "deflate"}
    async with InProcess(tiny_store, settings=LIMITS).client() as http:
        response = await http.post(EMBED, content=empty_blocks(), headers=headers)
    assert (response.status_code, response.json()["code"]) == (413, "body_too_large")


def test_compression_bomb_takes_bounded_memory() -> None:
    compression_bomb = zlib.compress(b" " * 100_000_000, 9)
    tracemalloc.start()
    plain = InflateDecoder(None).feed(compression_bomb, 2_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(plain) == 2_001
    assert peak < 500_000


def test_long_unknown_encoding_is_shortened() -> None:
    with pytest.raises(UnsupportedEncoding) as raised:
        select_decoder("x" * 1_000_000)
    assert len(raised.value.message) < 200


async def stalling(start: bytes) -> AsyncIterator[bytes]:
    yield start
    await asyncio.Event().wait()


async def test_slow_body_ends_with_408(tiny_store: Path) -> None:
    limits = LimitSettings(body_timeout_s=0.2)
    async with InProcess(tiny_store, settings=IngressUserConfig(limits=limits)).client() as http:
        response = await http.post(EMBED, content=stalling(b'{"inp'))
        openai = await http.post("/v1/embeddings", content=stalling(b"{"))
    assert (response.status_code, response.json()["code"]) == (408, "body_too_slow")
    assert "0.2 s " in response.json()["error"]
    assert openai.json()["error"]["code"] == "body_too_slow"
    assert openai.headers["x-should-retry"] == "false"


async def test_body_below_the_minimum_rate_ends_with_408(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.ingress.http.bodies.GRACE_S", 0.1)
    limits = LimitSettings(body_timeout_s=1_000, body_bytes_per_s=100)

    async def trickle() -> AsyncIterator[bytes]:
        for letter in BODY:
            yield bytes([letter])
            await asyncio.sleep(0.05)

    async with InProcess(tiny_store, settings=IngressUserConfig(limits=limits)).client() as http:
        slow = await http.post(EMBED, content=trickle())
        quick = await http.post(EMBED, content=BODY)
    assert (slow.status_code, slow.json()["code"]) == (408, "body_too_slow")
    assert "100 bytes" in slow.json()["error"]
    assert quick.status_code == 200


async def test_concurrent_body_bytes_are_limited_and_released(tiny_store: Path) -> None:
    patient = IngressUserConfig(
        limits=LimitSettings(body_bytes=2_000, body_timeout_s=30, inflight_body_bytes=3_000)
    )
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def waiting() -> AsyncIterator[bytes]:
        yield BODY[:-1].ljust(1_999)
        arrived.set()
        await go_on.wait()
        yield b"}"

    async with InProcess(tiny_store, settings=patient).client() as http:
        held = asyncio.ensure_future(http.post(EMBED, content=waiting()))
        await arrived.wait()
        probe = BODY.ljust(1_500)
        rejected = await http.post(EMBED, content=probe)
        small = await http.post(EMBED, content=BODY)
        go_on.set()
        answered = await held
        after = await http.post(EMBED, content=probe)
    assert rejected.headers["retry-after"] == "1"
    assert rejected.status_code == 429
    assert [small.status_code, answered.status_code, after.status_code] == [200] * 3


async def test_bodies_of_one_client_leave_room_for_those_of_others(tiny_store: Path) -> None:
    limits = LimitSettings(body_bytes=1_000, body_timeout_s=30, inflight_body_bytes=3_000)
    all_wait, go_on = asyncio.Barrier(3), asyncio.Event()

    async def waiting() -> AsyncIterator[bytes]:
        yield BODY[:-1].ljust(700)
        await all_wait.wait()
        await go_on.wait()
        yield b"}"

    loud, quiet = ({ADDRESS_HEADER: f"10.0.0.{host}"} for host in (1, 2))
    async with InProcess(tiny_store, settings=IngressUserConfig(limits=limits)).client() as http:
        held = [
            asyncio.ensure_future(http.post(EMBED, content=waiting(), headers=loud))
            for _ in range(2)
        ]
        await all_wait.wait()
        refused = await http.post(EMBED, content=BODY.ljust(900), headers=loud)
        answered = await http.post(EMBED, content=BODY.ljust(900), headers=quiet)
        go_on.set()
        assert [one.status_code for one in await asyncio.gather(*held)] == [200, 200]
    assert refused.status_code == 429
    assert "of this client are in flight" in refused.text
    assert answered.status_code == 200


async def test_lone_body_of_a_client_may_exceed_its_share_in_several_chunks(
    tiny_store: Path,
) -> None:
    async def halves() -> AsyncIterator[bytes]:
        yield BODY.ljust(1_000)
        yield b" " * 1_000

    headers = {ADDRESS_HEADER: "10.0.0.1"}
    limits = LimitSettings(body_bytes=2_000, inflight_body_bytes=3_000)
    async with InProcess(tiny_store, settings=IngressUserConfig(limits=limits)).client() as http:
        response = await http.post(EMBED, content=halves(), headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("declared", ["9" * 19, "9" * 5_000])
async def test_content_length_of_many_digits_is_too_large(declared: str, tiny_store: Path) -> None:
    async with InProcess(tiny_store, settings=LIMITS).client() as http:
        response = await http.post(EMBED, content=BODY, headers={"content-length": declared})
    assert (response.status_code, response.json()["code"]) == (413, "body_too_large")


async def test_error_with_a_long_value_is_short(tiny_store: Path) -> None:
    body = {"inputs": "a", "parameters": {"p" * 1_000_000: 1}}
    async with InProcess(tiny_store).client() as http:
        response = await http.post(EMBED, json=body)
    assert response.status_code == 422
    assert len(response.content) < 2_000
    assert response.json()["field"].startswith("parameters.ppp")
    assert "known: `truncate`" in response.json()["error"]
