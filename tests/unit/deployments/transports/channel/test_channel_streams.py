"""Streams over a channel: the direct connection of a client to a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

from deployments.deadlines import deadline_after
from deployments.errors import EngineFailed
from deployments.messages import CallBatch, GenerationCall, GenerationOptions
from deployments.transports.channel.client_connection import ClientConnection
from deployments.transports.channel.deployment_clients import (
    ChannelEncoderClient,
    ChannelGeneratorClient,
)
from deployments.transports.channel.frames import Frame, FrameType, Method
from deployments.transports.channel.replica_connections import ReplicaConnections
from deployments.transports.channel.server import ServerConnection
from deployments.transports.channel.services import encoder_service, generator_service
from tests.support.channel_replicas import (
    KEY,
    LAST,
    MODEL,
    EchoGenerator,
    FakeEncoder,
    FakeTokenizer,
    Fallback,
    build_call,
    pool_of,
)
from tests.support.channels import (
    call,
    connected_pool,
    pool_costs,
    running_replica,
    server_loads,
    until,
)


async def read(pool: ReplicaConnections, count: int, request: bytes) -> list[bytes]:
    events: list[bytes] = []
    async with aclosing(pool.stream(call(request, method=Method.STREAM))) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == count:
                break
    return events


async def test_stream_yields_all_events_in_order() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        replica.replica.release.set()
        events = [e async for e in pool.stream(call(b"500", method=Method.STREAM))]
        assert events == [str(n).encode() for n in range(500)]
        assert (pool_costs(pool), server_loads(replica)) == (0, 0)


async def test_closed_stream_is_cancelled_in_the_replica() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        assert len(await read(pool, 3, b"10")) == 3
        await until(lambda: replica.replica.cancelled == [b"10"])
        await until(lambda: server_loads(replica) == 0)


async def test_unread_stream_stops_at_the_window() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        sent: list[int] = []
        original = ServerConnection.send

        def count(self: ServerConnection, kind: FrameType, *parts: object) -> None:
            sent.append(kind)
            original(self, kind, *parts)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ServerConnection, "send", count)
            async with aclosing(pool.stream(call(b"1000", method=Method.STREAM))) as stream:
                await anext(stream)
                await until(lambda: sent.count(FrameType.EVENT) >= 64)
                await asyncio.sleep(0.05)
                assert sent.count(FrameType.EVENT) == 64


async def test_stream_is_retried_before_the_first_event_only() -> None:
    async with running_replica() as first, running_replica() as second:
        async with connected_pool(first, second) as pool:
            stream = pool.stream(call(b"0", method=Method.STREAM))
            waiting = asyncio.ensure_future(anext(stream, None))
            await until(lambda: first.replica.started or second.replica.started)
            victim, other = (first, second) if first.replica.started else (second, first)
            other.replica.release.set()
            victim.disconnect()
            assert await waiting is None
            assert other.replica.started == [b"0"]
        async with connected_pool(second) as pool:
            second.replica.release.clear()
            stream = pool.stream(call(b"1", method=Method.STREAM))
            assert await anext(stream) == b"0"
            second.disconnect()
            with pytest.raises(EngineFailed, match="lost"):
                await anext(stream)


@contextmanager
def received_frames() -> Iterator[list[int]]:
    """Yield the list to which the type of each frame from a replica is appended."""
    received: list[int] = []
    handle_frame = ClientConnection.handle_frame

    def note(self: ClientConnection, frame: Frame) -> None:
        received.append(frame.type)
        handle_frame(self, frame)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientConnection, "handle_frame", note)
        yield received


async def test_last_outcome_of_a_micro_batch_shares_a_frame_with_its_end() -> None:
    encoder: Any = FakeEncoder()
    tokenizer: Any = FakeTokenizer()
    async with pool_of(encoder_service(encoder, tokenizer)) as encoders:
        client = ChannelEncoderClient(ReplicaConnections("Fake", "node"), encoders, Fallback())
        for texts in (["a"], ["a", "b", "c"]):
            outcomes: dict[int, object] = {}
            batch = CallBatch(KEY, tuple(build_call(text) for text in texts))
            with received_frames() as received:
                await client.infer(batch, outcomes.__setitem__)
            assert len(outcomes) == len(texts)
            assert received == [FrameType.EVENT] * (len(texts) - 1) + [FrameType.ANSWER]


async def test_last_chunk_of_a_generation_shares_a_frame_with_its_end() -> None:
    generator: Any = EchoGenerator()
    call = GenerationCall(MODEL, "prompt", GenerationOptions(), deadline_after(10))
    async with pool_of(generator_service(generator)) as generators:
        with received_frames() as received:
            events = [
                one async for one in ChannelGeneratorClient(generators, Fallback()).stream(call)
            ]
    assert events[-1] == LAST
    assert received == [FrameType.EVENT, FrameType.EVENT, FrameType.ANSWER]
