"""Clients tell replicas the backlog: the cost of the calls that wait in the client."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from deployments.messages import CallBatch
from deployments.transports.channel import server as server_module
from deployments.transports.channel.client_connection import ChannelRequest
from deployments.transports.channel.deployment_clients import (
    LONE_CALL_CHARACTERS,
    ChannelEncoderClient,
)
from deployments.transports.channel.frames import AnswerFrame, Method
from tests.support.channels import call, connected_pool, running_replica, until
from tests.unit.deployments.transports.channel.test_deployment_clients import KEY, build_call


async def test_backlog_of_a_client_is_divided_among_the_replicas() -> None:
    async with (
        running_replica() as first,
        running_replica() as second,
        connected_pool(first, second) as pool,
    ):
        request = call(b"wait")._replace(backlog=10)
        tasks = [asyncio.create_task(pool.call(request)) for _ in range(2)]
        await until(lambda: first.server.calls == second.server.calls == 1)
        assert (first.server.backlog, second.server.backlog) == (5, 5)
        for one in (first, second):
            one.replica.release.set()
        await asyncio.gather(*tasks)
        await pool.call(call(b"echo"))
        assert 0 in (first.server.backlog, second.server.backlog), "each call reports it again"


async def test_calls_without_credit_are_the_backlog() -> None:
    async with running_replica(window=1) as one, connected_pool(one) as pool:
        tasks = [asyncio.create_task(pool.call(call(b"wait", cost))) for cost in (2, 3, 4)]
        await until(lambda: one.server.calls == 1)
        assert one.server.backlog == 0
        tasks[0].cancel()
        await until(lambda: len(one.replica.started) == 2)
        assert one.server.backlog == 4
        one.replica.release.set()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert one.server.backlog == 0


async def test_backlog_ends_with_its_client_and_with_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_replica() as one:
        async with connected_pool(one) as pool:
            await pool.call(call(b"echo")._replace(backlog=10))
            assert one.server.backlog == 10
            with monkeypatch.context() as later:
                later.setattr(server_module, "BACKLOG_S", 0.0)
                assert one.server.backlog == 0
            assert one.server.backlog == 10
        await until(lambda: not one.server.connections)
        assert one.server.backlog == 0


class RecordingReplicaConnections:
    """A ReplicaConnections that records its requests. Every two characters are one token."""

    def __init__(self) -> None:
        self.requests: list[ChannelRequest] = []
        self.connected = 1
        self.has_idle_replica = lambda _model: False

    async def call(self, request: ChannelRequest) -> AnswerFrame:
        self.requests.append(request)
        return AnswerFrame(0, 1, request.cost // 2, memoryview(b""))


async def test_encoders_get_the_backlog_in_tokens() -> None:
    tokenizers: Any = RecordingReplicaConnections()
    client = ChannelEncoderClient(tokenizers, tokenizers, tokenizers)
    text = "a" * (LONE_CALL_CHARACTERS + 1)
    request = await client._build_request(CallBatch(KEY, (build_call(text),), backlog=3 * 1001))
    assert (request.method, request.cost) == (Method.INFER, 500)
    assert request.backlog == 3 * 500
    (tokenizing,) = tokenizers.requests
    assert tokenizing.backlog == 3 * 1001
