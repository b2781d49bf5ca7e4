"""The hooks of Ray Serve that channels depend on, checked against the installed version."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from ray.serve._private.constants import RECORD_REPLICA_METADATA_METHOD
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RequestRouter, RunningReplica

from deployments.app import Encoder, Generator, Ingress, Tokenizer
from deployments.transports.channel.directory import DIRECTORY, Directory, Endpoints
from deployments.transports.channel.endpoint import Endpoint
from deployments.transports.channel.frames import WIRE_VERSION
from deployments.transports.channel.router import AnnouncingRouter
from tests.support.fakes import wait_until

ENDPOINT = Endpoint(WIRE_VERSION, "node", "/tmp/replica.sock", "127.0.0.1", 1, "ab")
ROUTER = "deployments.transports.channel.router:AnnouncingRouter"


async def test_listener_gets_the_present_and_every_later_list() -> None:
    directory, received = Directory(), list[Endpoints]()
    directory.publish("CpuEncoder", {"a": ENDPOINT})
    directory.subscribe("CpuEncoder", received.append)
    directory.subscribe("Tokenizer", received.append)
    await asyncio.sleep(0)
    await asyncio.to_thread(directory.publish, "CpuEncoder", {})
    await asyncio.sleep(0)
    assert received == [{"a": ENDPOINT}, {}, {}]


async def test_listener_ends_with_the_latest_list() -> None:
    """Another thread publishes between a subscription and its first report."""
    directory, received = Directory(), list[Endpoints]()
    directory.publish("CpuEncoder", {"a": ENDPOINT})
    loop = asyncio.get_running_loop()
    call_soon = loop.call_soon

    def publish_first(callback: Any, *args: Any) -> Any:
        loop.call_soon = call_soon  # type: ignore[method-assign]
        directory.publish("CpuEncoder", {"b": ENDPOINT})
        return call_soon(callback, *args)

    loop.call_soon = publish_first  # type: ignore[assignment, method-assign]
    directory.subscribe("CpuEncoder", received.append)
    await wait_until(lambda: len(received) > 0 and received[-1] == {"b": ENDPOINT})


def test_serve_loads_the_router_and_it_publishes_the_replicas(monkeypatch: Any) -> None:
    config = RequestRouterConfig(request_router_class=ROUTER)
    router_class = config.get_request_router_class()
    assert issubclass(router_class, RequestRouter)
    published: dict[str, Endpoints] = {}
    monkeypatch.setattr(DIRECTORY, "publish", published.__setitem__)
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *_: None)
    router = object.__new__(router_class)
    router._deployment_id = SimpleNamespace(name="CpuEncoder")
    with_channel, without = (
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), replica_metadata=metadata)
        for name, metadata in (("a", ENDPOINT.to_metadata()), ("b", {}))
    )
    router.update_replicas([with_channel, without])
    assert published == {"CpuEncoder": {"a": ENDPOINT}}


async def test_router_compares_two_random_replicas() -> None:
    router: Any = object.__new__(AnnouncingRouter)
    replicas: list[Any] = [object(), object(), object()]
    ((first, second),) = await router.choose_replicas(replicas)
    assert first is not second
    assert await router.choose_replicas(replicas[:1]) == [replicas[:1]]


def test_serve_calls_the_hooks_by_these_names() -> None:
    assert RECORD_REPLICA_METADATA_METHOD == "record_replica_metadata"
    assert isinstance(RunningReplica.replica_metadata, property)
    for deployment in (Tokenizer, Encoder, Generator):
        for hook in (RECORD_REPLICA_METADATA_METHOD, "record_autoscaling_stats"):
            assert asyncio.iscoroutinefunction(getattr(deployment, hook))
    assert not hasattr(Ingress, RECORD_REPLICA_METADATA_METHOD)
