"""Generation with many concurrent clients, disconnecting clients and a killed generator."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import jsonschema
import pytest

from tests.end_to_end.conftest import KV_SLOTS
from tests.end_to_end.test_generation_openai import TALLY, USER
from tests.support.cluster_faults import RECOVERY_S, noise
from tests.support.ray_cluster import Cluster
from tests.support.served_models import FIXED_TEXT_MODEL, LONG_CONTEXT, SAYS, WRITER
from tests.support.waiting import TIMEOUT_S, wait_for

COMPLETIONS = "/v1/completions"
ACTIVE, GENERATED = "hundredfold_running_requests", "hundredfold_generated_tokens_total"
EXPORT_S = 30  # maximum wait until the metrics show a change
ANSWERED_S = 60  # maximum wait for a short generation
IMPATIENT_S = 1.5  # after which a client disconnects
FREED_S = 120  # maximum wait until a short generation is answered

Tasks = list[asyncio.Task[list[str]]]
# Far more than a test waits for, but few enough that a slow host predicts KV_SLOTS such generations
# to end before their deadline. Otherwise it refuses them.
ENDLESS_TOKENS = LONG_CONTEXT // 2
ENDLESS = noise(ENDLESS_TOKENS)


@asynccontextmanager
async def readers(cluster: Cluster, count: int, body: dict[str, Any]) -> AsyncIterator[Tasks]:
    """Read `count` streams in tasks. Disconnect them at the end of the block.

    The block starts when each stream has returned a line. The response header is not enough,
    because it comes before the first token.
    """
    begun = [asyncio.Event() for _ in range(count)]

    async def read(http: httpx.AsyncClient, has_words: asyncio.Event) -> list[str]:
        lines: list[str] = []
        async with http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                lines.append(line)
                has_words.set()
        return [line for line in lines if line]

    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
        tasks = [asyncio.create_task(read(http, has_words)) for has_words in begun]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for has_words in begun:
                    await has_words.wait()
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def read_metric(cluster: Cluster, name: str) -> float:
    """Return the sum of a metric of WRITER."""
    found = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", cluster.metrics(), re.MULTILINE)
    return sum(float(value) for labels, value in found if f'model="{WRITER}"' in labels)


def active(cluster: Cluster) -> float:
    """Return how many requests for WRITER run, according to the metrics."""
    return read_metric(cluster, ACTIVE)


@contextmanager
def canceled(cluster: Cluster) -> Iterator[None]:
    """Check that KV_SLOTS endless generations of the block are canceled, and free their slots."""
    wait_for(lambda: active(cluster) == 0, EXPORT_S)
    before = read_metric(cluster, GENERATED)
    yield
    wait_for(lambda: is_answered(cluster), FREED_S)
    wait_for(lambda: active(cluster) == 0, EXPORT_S)
    assert read_metric(cluster, GENERATED) - before < KV_SLOTS * ENDLESS_TOKENS


def is_answered(cluster: Cluster) -> bool:
    """Return whether a short generation succeeds within ANSWERED_S."""
    try:
        reply = httpx.post(cluster.url + COMPLETIONS, json=noise(3), timeout=ANSWERED_S)
    except httpx.TimeoutException:
        return False
    return reply.status_code == 200


def test_fifty_concurrent_requests_follow_their_schema(cluster: Cluster) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "tally", "schema": TALLY}}

    async def ask(http: httpx.AsyncClient, seed: int) -> httpx.Response:
        body = {"model": WRITER, "messages": [USER], "seed": seed, "response_format": form}
        return await http.post("/v1/chat/completions", json=body)

    async def all_of_them() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as http:
            return await asyncio.gather(*(ask(http, seed) for seed in range(50)))

    replies = asyncio.run(all_of_them())
    assert {reply.status_code for reply in replies} == {200}
    texts = [reply.json()["choices"][0]["message"]["content"] for reply in replies]
    for text in texts:
        jsonschema.validate(json.loads(text), TALLY)
    assert len(set(texts)) > 10


async def test_request_waits_for_a_free_slot(cluster: Cluster) -> None:
    client = httpx.AsyncClient(base_url=cluster.url, timeout=100)
    async with readers(cluster, KV_SLOTS, noise(6_000)), client as http:
        reply = await http.post(COMPLETIONS, json=noise(3))
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 3
    waited = re.search(r"queue;dur=([0-9.]+)", reply.headers["server-timing"])
    assert waited
    assert float(waited[1]) > 10  # milliseconds


async def test_disconnected_streams_free_their_slots(cluster: Cluster) -> None:
    with canceled(cluster):
        async with readers(cluster, KV_SLOTS, ENDLESS):
            await asyncio.to_thread(wait_for, lambda: active(cluster) == KV_SLOTS, EXPORT_S)


async def test_disconnected_requests_free_their_slots(cluster: Cluster) -> None:
    async def impatient(http: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(COMPLETIONS, json=ENDLESS)

    timeout = httpx.Timeout(TIMEOUT_S, read=IMPATIENT_S)
    with canceled(cluster):
        async with httpx.AsyncClient(base_url=cluster.url, timeout=timeout) as http:
            await asyncio.gather(*(impatient(http) for _ in range(KV_SLOTS)))


async def test_killed_generator_ends_streams_with_an_error_and_restarts(
    cluster: Cluster,
) -> None:
    (victim, *_) = cluster.replicas("CpuGenerator")
    async with readers(cluster, 1, ENDLESS) as (stream,):
        victim.kill()
        first, *_, last = await stream
    assert "error" not in json.loads(first.removeprefix("data: "))
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("engine_failed", "server_error")
    assert "lost" in error["message"]
    wait_for(lambda: is_answered(cluster), RECOVERY_S)
    assert victim.pid not in {one.pid for one in cluster.replicas("CpuGenerator")}
    body = {"model": FIXED_TEXT_MODEL, "messages": [USER], "temperature": 0}
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=30).json()
    assert response["choices"][0]["message"]["content"] == SAYS
