"""Calls that a replica refuses: which replicas get them next, and how many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from deployments.errors import (
    EngineFailed,
    ModelUnavailable,
    Overloaded,
    ServeError,
    build_overloaded,
)
from deployments.health import MAX_CONSECUTIVE_FAILURES, WorkerHealth
from deployments.messages import CallBatch, CallOutcome, CallResult, TokenizedBatch
from deployments.transports.channel.deployment_clients import ChannelEncoderClient
from deployments.transports.channel.frames import MAX_U32, FrameType, Method
from deployments.transports.channel.replica_connections import (
    MAX_REFUSALS,
    MAX_TRIES,
    ReplicaConnections,
)
from deployments.transports.channel.server import ChannelServer, Reply, Service
from deployments.transports.channel.services import encoder_service
from tests.support.channel_replicas import KEY, FakeEncoder, FakeTokenizer, Fallback, build_call
from tests.support.channels import NODE, call, send, until
from tests.support.fakes import TIMEOUT_S, collect_outcomes

FULL = Overloaded("the queue is full")


class RefusingReplica:
    """Replica that raises `refusal`, if it is set. Calls with the message `b"long"` never end."""

    def __init__(self, refusal: ServeError | None = None, window: int = MAX_U32) -> None:
        self.refusal = refusal
        self.calls = 0
        self.server = ChannelServer(Service({Method.INFER: self.infer}, {}, window))
        self.drains = False

    async def infer(self, message: memoryview, _deadline_s: float) -> Reply:
        self.calls += 1
        if message == b"long":
            await asyncio.Event().wait()
        if self.drains:
            for connection in self.server.connections:
                connection.send(FrameType.GOAWAY)
        if self.refusal is not None:
            raise self.refusal
        return Reply(b"answer")


class LostReplica(RefusingReplica):
    """Replica that breaks its connections during each call, as a killed process does."""

    async def infer(self, message: memoryview, deadline_s: float) -> Reply:
        self.calls += 1
        for connection in tuple(self.server.connections):
            connection.abort()
        return Reply(b"not received")


@asynccontextmanager
async def pool_over(*servers: ChannelServer) -> AsyncIterator[ReplicaConnections]:
    async with AsyncExitStack() as stack:
        pool = ReplicaConnections("CpuEncoder", NODE)
        for server in servers:
            stack.push_async_callback(server.close, 0)
        stack.callback(pool.close)
        endpoints = [await server.start(NODE, "127.0.0.1") for server in servers]
        pool.update({str(index): endpoint for index, endpoint in enumerate(endpoints)})
        await until(lambda: pool.connected == len(servers))
        yield pool


async def test_full_replica_refuses_once_and_then_gets_no_calls() -> None:
    full, free = RefusingReplica(FULL), RefusingReplica()
    async with pool_over(full.server, free.server) as pool:
        other = ReplicaConnections(
            "CpuEncoder", NODE
        )  # of another process, which filled the replica
        other.update({"0": await full.server.start(NODE, "127.0.0.1")})
        await until(lambda: other.connected == 1)
        long = asyncio.create_task(send(other, b"long", cost=1_000))
        await until(lambda: full.calls == 1)
        for _ in range(20):
            assert await send(pool, b"call") == b"answer"
        assert full.calls == 2, "the error of the first call reports the load"
        other.close()
        long.cancel()


async def test_refused_calls_cost_two_tries_while_all_replicas_are_full() -> None:
    replicas = [RefusingReplica(FULL) for _ in range(4)]
    async with pool_over(*(replica.server for replica in replicas)) as pool:
        for _ in range(5):
            with pytest.raises(Overloaded):
                await send(pool, b"call")
    assert sum(replica.calls for replica in replicas) == 5 * MAX_REFUSALS


@pytest.mark.usefixtures("long_quarantine")
async def test_calls_for_a_quarantined_model_are_answered_by_another_replica() -> None:
    health = WorkerHealth("model")
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        health.record_failure(EngineFailed("broken"))
    with pytest.raises(ModelUnavailable) as quarantine:
        health.admit()
    broken, working = RefusingReplica(quarantine.value), RefusingReplica()
    async with pool_over(broken.server, working.server) as pool:
        for _ in range(10):
            assert await send(pool, b"call") == b"answer"
    assert working.calls == 10


async def test_free_replica_answers_beside_a_full_and_a_failing_one() -> None:
    full, failing = RefusingReplica(FULL), RefusingReplica(ModelUnavailable("it keeps failing"))
    free = RefusingReplica()
    async with pool_over(failing.server, full.server, free.server) as pool:
        for _ in range(20):
            assert await send(pool, b"call") == b"answer"


async def test_loss_after_refusals_raises_the_refusal() -> None:
    failing = [RefusingReplica(ModelUnavailable("it keeps failing")) for _ in range(MAX_TRIES - 1)]
    lost = LostReplica()
    # Of equally loaded replicas, the first one gets the call.
    async with pool_over(*(one.server for one in failing), lost.server) as pool:
        with pytest.raises(ModelUnavailable):
            await send(pool, b"call")
    assert [one.calls for one in (*failing, lost)] == [1] * MAX_TRIES


async def test_refusal_by_a_draining_replica_leaves_the_other_replica_a_try() -> None:
    draining, working = RefusingReplica(FULL), RefusingReplica()
    draining.drains = True
    async with pool_over(draining.server, working.server) as pool:
        (busy,) = [c for c in pool.connections() if c is not pool.connections()[0]]
        busy.pending_cost += 1  # so that the draining replica is asked first
        assert await send(pool, b"call") == b"answer"
        busy.pending_cost -= 1
    assert (draining.calls, working.calls) == (1, 1)


@asynccontextmanager
async def pool_beside_a_busy_replica(
    refusing: RefusingReplica, busy: RefusingReplica
) -> AsyncIterator[tuple[ReplicaConnections, asyncio.Task[bytes]]]:
    """Yield a pool and the call that takes the whole window of `busy`."""
    async with pool_over(busy.server, refusing.server) as pool, asyncio.timeout(TIMEOUT_S):
        long = asyncio.create_task(send(pool, b"long"))  # to the first of equally loaded replicas
        await until(lambda: busy.calls == 1)
        yield pool, long
        long.cancel()


async def test_refusal_by_a_full_replica_is_final_while_the_others_have_no_credit() -> None:
    full, busy = RefusingReplica(FULL), RefusingReplica(window=1)
    async with pool_beside_a_busy_replica(full, busy) as (pool, _):
        with pytest.raises(Overloaded):
            await send(pool, b"call")
    assert (full.calls, busy.calls) == (1, 1)


async def test_call_for_a_quarantined_model_waits_for_a_replica_without_credit() -> None:
    failing, busy = RefusingReplica(ModelUnavailable("it keeps failing")), RefusingReplica(window=1)
    async with pool_beside_a_busy_replica(failing, busy) as (pool, long):
        waiting = asyncio.create_task(send(pool, b"call"))
        refusing = pool.connections()[1]
        await until(lambda: failing.calls == 1 and not refusing.pending_cost)
        long.cancel()
        assert await waiting == b"answer"
    assert (failing.calls, busy.calls) == (1, 2)


async def test_draining_replica_gets_no_call_that_another_refused() -> None:
    failing, busy = RefusingReplica(ModelUnavailable("it keeps failing")), RefusingReplica(window=1)
    async with pool_beside_a_busy_replica(failing, busy) as (pool, _):
        for connection in busy.server.connections:
            connection.send(FrameType.GOAWAY)
        await until(lambda: pool.connected == 1)
        with pytest.raises(ModelUnavailable):
            await send(pool, b"call")
    assert (failing.calls, busy.calls) == (1, 1)


class FullEncoder(FakeEncoder):
    """Encoder that refuses the first `refused` calls of each batch."""

    def __init__(self, refused: int) -> None:
        super().__init__()
        self.refused = refused
        self.batches = 0

    async def stream(self, batch: TokenizedBatch) -> AsyncGenerator[dict[int, CallOutcome], None]:
        self.batches += 1
        if self.refused:
            yield dict.fromkeys(range(min(self.refused, len(batch.calls))), FULL)
        async for outcomes in super().stream(batch):
            if min(outcomes) >= self.refused:
                yield outcomes


@pytest.mark.parametrize(("refused", "batches"), [(2, 1), (1, 0)])
async def test_micro_batch_goes_to_another_encoder_if_all_its_calls_are_refused(
    refused: int, batches: int
) -> None:
    tokenizer: Any = FakeTokenizer()
    encoders: list[Any] = [FullEncoder(refused), FullEncoder(0)]
    servers = [ChannelServer(encoder_service(encoder, tokenizer)) for encoder in encoders]
    async with pool_over(*servers) as pool:
        pool.connections()[1].pending_cost += 1  # so that the full encoder is asked first
        client = ChannelEncoderClient(pool, pool, Fallback())
        batch = CallBatch(KEY, (build_call("a"), build_call("b")))
        outcomes = await collect_outcomes(client, batch)
    assert [encoder.batches for encoder in encoders] == [1, batches]
    answered = [isinstance(outcome, CallResult) for outcome in outcomes]
    assert answered == [refused == 2, True], "a call that was answered is not computed again"


async def test_repeated_stream_that_is_refused_goes_to_a_third_replica() -> None:
    events: list[bytes] = []
    asked: list[ChannelServer] = []

    def make_server() -> ChannelServer:
        async def stream(
            _message: memoryview, _deadline_s: float
        ) -> AsyncGenerator[bytes | Reply, None]:
            asked.append(server)
            if len(asked) == 1:
                yield b"first"
                await until(lambda: events == [b"first"])
                for connection in tuple(server.connections):
                    connection.abort()
                await asyncio.Event().wait()
            if len(asked) == 2:
                raise FULL
            yield b"all"

        server = ChannelServer(Service({}, {Method.STREAM: stream}, MAX_U32))
        return server

    async with pool_over(*(make_server() for _ in range(3))) as pool:
        request = call(b"", method=Method.STREAM)._replace(is_repeatable=True)
        async for event in pool.stream(request):
            events.append(bytes(event))
    assert events[:2] == [b"first", b"all"]
    assert len(set(asked)) == 3


class OverloadedEncoder(FakeEncoder):
    """Encoder that refuses two calls, only the second one with a prediction."""

    async def stream(self, batch: TokenizedBatch) -> AsyncGenerator[dict[int, CallOutcome], None]:
        assert len(batch.calls) == 2
        yield {0: FULL, 1: build_overloaded("the queue is too long", 3.0, needed_s=9.0)}


async def test_refusal_of_a_micro_batch_states_a_prediction_if_one_call_has_one() -> None:
    encoder: Any = OverloadedEncoder()
    tokenizer: Any = FakeTokenizer()
    async with pool_over(ChannelServer(encoder_service(encoder, tokenizer))) as pool:
        client = ChannelEncoderClient(pool, pool, Fallback())
        batch = CallBatch(KEY, (build_call("a"), build_call("b")))
        with pytest.raises(Overloaded) as refused:
            await collect_outcomes(client, batch)
    assert refused.value.needed_s == pytest.approx(9.0, abs=0.1)
