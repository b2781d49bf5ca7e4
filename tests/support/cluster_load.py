"""Load on a running cluster. Every answer is checked."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import httpx
import numpy as np

from tests.support.ray_cluster import Cluster
from tests.support.served_models import EMBEDDER

SENTENCE = "A sentence of middling length."


def embed(cluster: Cluster, inputs: Any) -> httpx.Response:
    body = {"inputs": inputs, "options": {"use_cache": False}}
    return httpx.post(f"{cluster.url}/models/{EMBEDDER}", json=body, timeout=60)


async def load(cluster: Cluster, clients: int, until: Coroutine[Any, Any, None]) -> list[int]:
    """Let `clients` clients send requests of eight sentences in closed loops until `until` ends.

    Return the statuses. Check the embeddings of every answer with status 200.
    """
    statuses: list[int] = []
    expected = np.array(embed(cluster, SENTENCE).json()[0])
    ending = asyncio.ensure_future(until)

    async def one(client: httpx.AsyncClient) -> None:
        body = {"inputs": [SENTENCE] * 8, "options": {"use_cache": False}}
        while not ending.done():
            reply = await client.post(f"/models/{EMBEDDER}", json=body)
            statuses.append(reply.status_code)
            if reply.status_code == 200:
                rows = np.array(reply.json())
                assert rows.shape == (8, 384)
                assert (rows @ expected).min() > 0.98

    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        await asyncio.gather(ending, *(one(client) for _ in range(clients)))
    return statuses
