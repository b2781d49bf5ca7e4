"""Rate and concurrency limits of API keys with two ingress replicas."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.keys.key import KeyLimits, Scope
from deployments.keys.limits import BURST_MINUTES
from tests.support.keys import add_key, bearer
from tests.support.ray_cluster import Cluster
from tests.support.served_models import EMBEDDER
from tests.support.waiting import wait_for

REPLICAS = 2
PER_MINUTE = 240
CONNECTIONS = 16
SECONDS = 3.0


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def keys(key_file: Path) -> dict[str, dict[str, str]]:
    """Return, by name, the headers of a key without limits and of one key for each limit."""
    limits = {
        "operator": KeyLimits(),
        "per-minute": KeyLimits(requests_per_minute=PER_MINUTE),
        "at-a-time": KeyLimits(concurrent_requests=1),
    }
    scopes = (Scope.INFER, Scope.ADMIN)
    return {
        name: bearer(add_key(key_file, name, limits=limit, scopes=scopes))
        for name, limit in limits.items()
    }


@pytest.fixture(scope="module")
def shared(
    cluster: Cluster, config: dict[str, Any], key_file: Path, keys: dict[str, dict[str, str]]
) -> Iterator[Cluster]:
    """The cluster with API keys and two ingress replicas that count each other in `/stats`."""
    keyed = copy.deepcopy(config)
    deployments = {one["name"]: one for one in keyed["applications"][0]["deployments"]}
    deployments["Ingress"]["num_replicas"] = REPLICAS
    deployments["Ingress"]["user_config"]["key_file"] = str(key_file)
    cluster.settle(keyed)

    def all_know() -> bool:
        replies = [
            httpx.get(f"{cluster.url}/stats", headers=keys["operator"], timeout=60)
            for _ in range(4 * REPLICAS)
        ]
        return {reply.json()["ingress_replicas"] for reply in replies} == {REPLICAS}

    try:
        wait_for(all_know, 120)
        yield cluster
    finally:
        cluster.settle(config)


async def ask(cluster: Cluster, headers: dict[str, str], inputs: Any, seconds: float) -> list[int]:
    """Send requests over CONNECTIONS connections for some seconds; return the statuses.

    Each connection sends at least one request. With `seconds` above 0, all go on until one of them
    was refused, because a slow host reaches the limit later.
    """
    statuses: list[int] = []
    body = {"inputs": inputs, "options": {"use_cache": False}}

    async def ask_on(client: httpx.AsyncClient, ends_s: float) -> None:
        while True:
            reply = await client.post(f"/models/{EMBEDDER}", json=body)
            statuses.append(reply.status_code)
            if time.monotonic() > ends_s and (not seconds or 429 in statuses):
                return
            await asyncio.sleep(0.02)

    limits = httpx.Limits(max_connections=CONNECTIONS)
    async with httpx.AsyncClient(
        base_url=cluster.url, headers=headers, limits=limits, timeout=120
    ) as client:
        ends_s = time.monotonic() + seconds
        await asyncio.gather(*(ask_on(client, ends_s) for _ in range(CONNECTIONS)))
    return statuses


def test_replicas_share_the_requests_per_minute(
    shared: Cluster, keys: dict[str, dict[str, str]]
) -> None:
    started_s = time.monotonic()
    counts = Counter(asyncio.run(ask(shared, keys["per-minute"], "a", SECONDS)))
    elapsed_s = time.monotonic() - started_s
    assert set(counts) == {200, 429}
    earned = PER_MINUTE * (BURST_MINUTES + elapsed_s / 60)
    assert 0.7 * PER_MINUTE * (BURST_MINUTES + SECONDS / 60) <= counts[200] <= earned + REPLICAS


def test_one_request_at_a_time_is_one_per_replica(
    shared: Cluster, keys: dict[str, dict[str, str]]
) -> None:
    counts = Counter(asyncio.run(ask(shared, keys["at-a-time"], ["a sentence"] * 1_000, 0.0)))
    assert set(counts) == {200, 429}
    assert 1 <= counts[200] <= REPLICAS
