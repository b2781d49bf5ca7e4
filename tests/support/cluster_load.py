"""Requests to a running cluster, with every answer checked."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import numpy as np

from tests.support.ray_cluster import Cluster
from tests.support.served_models import EMBEDDER

SENTENCE = "A sentence of middling length."


def embed(cluster: Cluster, inputs: Any) -> httpx.Response:
    body = {"inputs": inputs, "options": {"use_cache": False}}
    return httpx.post(f"{cluster.url}/models/{EMBEDDER}", json=body, timeout=60)


async def load(cluster: Cluster, clients: int, seconds: float) -> list[int]:
    """Closed-loop requests of eight sentences; the statuses, every answer checked."""
    stop_s = time.monotonic() + seconds
    statuses: list[int] = []
    expected = np.array(embed(cluster, SENTENCE).json()[0])

    async def one(client: httpx.AsyncClient) -> None:
        body = {"inputs": [SENTENCE] * 8, "options": {"use_cache": False}}
        while time.monotonic() < stop_s:
            reply = await client.post(f"/models/{EMBEDDER}", json=body)
            statuses.append(reply.status_code)
            if reply.status_code == 200:
                rows = np.array(reply.json())
                assert rows.shape == (8, 384)
                assert (rows @ expected).min() > 0.98

    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        await asyncio.gather(*(one(client) for _ in range(clients)))
    return statuses
