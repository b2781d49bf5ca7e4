"""Load of every kind on a running cluster, with every answer checked, while a fault is caused."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
import psutil

from tests.support.cluster_load import embed
from tests.support.ray_cluster import Cluster
from tests.support.served_models import EMBEDDER, WRITER

COMPLETIONS = "/v1/completions"
SENTENCES = [f"A sentence of middling length, number {number}." for number in range(8)]
DONE = "[DONE]"  # ends a stream
RIGHT = "right"
WRONG = "wrong"
START_S = 2.0  # s of load before the fault
TIMEOUT_S = 60.0  # s without a byte after which a client gives up
TOLERANCE = 1e-3  # of an embedding in other company


def noise(tokens: int) -> dict[str, Any]:
    """A request for exactly so many tokens, the same in every run."""
    body = {"model": WRITER, "prompt": "the rain", "max_tokens": tokens, "min_tokens": tokens}
    return {**body, "seed": 1}


class Seen(NamedTuple):
    """What a client saw: RIGHT, WRONG, a status with its code, or the name of httpx's error."""

    outcome: str
    characters: int = 0  # of generated text


Send = Callable[[httpx.AsyncClient], Awaitable[Seen]]


@dataclass(frozen=True, slots=True)
class Observation:
    """One request under load."""

    kind: str
    seen: Seen
    started_s: float  # time.monotonic
    ended_s: float

    @property
    def is_right(self) -> bool:
        return self.seen.outcome == RIGHT


@dataclass(frozen=True, slots=True)
class Clients:
    """Numbers of clients that send one request after the other."""

    embeddings: int = 2
    completions: int = 2
    streams: int = 2
    tokens: int = 200  # per completion and stream
    long_streams: int = 0  # one per client, begun with the load
    long_tokens: int = 12_000

    @property
    def count(self) -> int:
        return self.embeddings + self.completions + self.streams + self.long_streams


@dataclass(frozen=True, slots=True)
class Scene:
    """What was seen under load, and when the fault had been caused."""

    observations: tuple[Observation, ...]
    fault_s: float

    def of(self, *kinds: str) -> list[Observation]:
        return [one for one in self.observations if one.kind in kinds]

    def failed(self) -> list[Observation]:
        return [one for one in self.observations if not one.is_right]

    def describe(self) -> str:
        counts = Counter((one.kind, one.seen.outcome) for one in self.observations)
        longest = {
            kind: max(one.ended_s - one.started_s for one in self.of(kind))
            for kind in {one.kind for one in self.observations}
        }
        in_flight = sum(one.started_s < self.fault_s < one.ended_s for one in self.observations)
        return f"{dict(counts)}, longest s {longest}, {in_flight} in flight at the fault"


class FaultLoad:
    """Closed-loop clients of a cluster whose right answers are known."""

    def __init__(self, cluster: Cluster, clients: Clients) -> None:
        self._url = cluster.url
        self._clients = clients
        self._vectors: list[list[float]] = embed(cluster, SENTENCES).json()
        body = noise(clients.tokens)
        reply = httpx.post(cluster.url + COMPLETIONS, json=body, timeout=60)
        self._text: str = reply.json()["choices"][0]["text"]

    async def run(self, seconds: float, fault: Callable[[], object]) -> Scene:
        """Cause the fault START_S after the load began, and send for `seconds` more.

        The requests that are then in flight are awaited.
        """
        stop = asyncio.Event()
        senders = {
            "embedding": (self._embed, self._clients.embeddings),
            "completion": (self._complete, self._clients.completions),
            "stream": (self._stream, self._clients.streams),
        }
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S) as http:
            tasks = [
                asyncio.create_task(self._repeat(http, kind, send, stop))
                for kind, (send, count) in senders.items()
                for _ in range(count)
            ]
            tasks += [
                asyncio.create_task(self._observe(http, "long stream", self._stream_long))
                for _ in range(self._clients.long_streams)
            ]
            await asyncio.sleep(START_S)
            await asyncio.to_thread(fault)
            fault_s = time.monotonic()
            await asyncio.sleep(seconds)
            stop.set()
            observations = await asyncio.gather(*tasks)
        return Scene(tuple(one for many in observations for one in many), fault_s)

    async def _observe(self, http: httpx.AsyncClient, kind: str, send: Send) -> list[Observation]:
        started_s = time.monotonic()
        try:
            seen = await send(http)
        except httpx.HTTPError as error:
            seen = Seen(type(error).__name__)
        return [Observation(kind, seen, started_s, time.monotonic())]

    async def _repeat(
        self, http: httpx.AsyncClient, kind: str, send: Send, stop: asyncio.Event
    ) -> list[Observation]:
        observations: list[Observation] = []
        while not stop.is_set():
            observations += await self._observe(http, kind, send)
        return observations

    async def _embed(self, http: httpx.AsyncClient) -> Seen:
        body = {"inputs": SENTENCES, "options": {"use_cache": False}}
        reply = await http.post(f"/models/{EMBEDDER}", json=body)
        if reply.status_code != 200:
            return _failure(reply)
        rows = reply.json()
        pairs = zip(rows, self._vectors, strict=True)
        worst = min(sum(a * b for a, b in zip(x, y, strict=True)) for x, y in pairs)
        return Seen(RIGHT if worst > 1 - TOLERANCE else WRONG)

    async def _complete(self, http: httpx.AsyncClient) -> Seen:
        reply = await http.post(COMPLETIONS, json=noise(self._clients.tokens))
        if reply.status_code != 200:
            return _failure(reply)
        return self._compare(reply.json()["choices"][0]["text"])

    async def _stream(self, http: httpx.AsyncClient) -> Seen:
        text, end = await self._read(http, self._clients.tokens)
        return self._compare(text) if end == DONE else self._cut(text, end)

    async def _stream_long(self, http: httpx.AsyncClient) -> Seen:
        """Compare the beginning; the text of a long stream is not known."""
        text, end = await self._read(http, self._clients.long_tokens)
        is_right = end == DONE and text.startswith(self._text)
        return Seen(RIGHT if is_right else f"cut: {end}", len(text))

    async def _read(self, http: httpx.AsyncClient, tokens: int) -> tuple[str, str]:
        """Return the text of a stream, and DONE or why it ended early."""
        body, text = {**noise(tokens), "stream": True}, ""
        try:
            async with http.stream("POST", COMPLETIONS, json=body) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    return text, _failure(reply).outcome
                async for line in reply.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == DONE:
                        return text, DONE
                    if not data:
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        return text, event["error"]["code"]
                    text += event["choices"][0]["text"]
        except httpx.HTTPError as error:
            return text, type(error).__name__
        return text, "no end"

    def _compare(self, text: str) -> Seen:
        return Seen(RIGHT if text == self._text else WRONG, len(text))

    def _cut(self, text: str, error: str) -> Seen:
        """A stream that ended early must have been right so far."""
        return Seen(error if self._text.startswith(text) else WRONG, len(text))


def _failure(reply: httpx.Response) -> Seen:
    try:
        error = reply.json()["error"]
        return Seen(f"{reply.status_code} {error['code'] if isinstance(error, dict) else error}")
    except (ValueError, KeyError, TypeError):
        return Seen(f"{reply.status_code} {reply.text[:60]!r}")


def changed(config: dict[str, Any], **changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with keys of some deployments replaced; mappings are merged."""
    config = copy.deepcopy(config)
    for deployment in config["applications"][0]["deployments"]:
        for key, value in changes.get(deployment["name"], {}).items():
            merged = isinstance(value, Mapping)
            deployment[key] = {**deployment[key], **value} if merged else value
    return config


def count_sockets(replicas: Iterable[psutil.Process]) -> Counter[str]:
    """Count the sockets by path: each replica listens, and its clients connect."""
    return Counter(
        str(connection.laddr)
        for replica in replicas
        for connection in replica.net_connections("unix")
        if str(connection.laddr).endswith("replica.sock")
    )


def are_connected(replicas: Iterable[psutil.Process], count: int, clients: int = 1) -> bool:
    """Whether there are `count` replicas, each with a connection from every ingress replica."""
    try:
        sockets = count_sockets(replicas)
    except psutil.Error:  # a replica has just ended
        return False
    return list(sockets.values()) == [1 + clients] * count


def has_channels(cluster: Cluster, deployment: str, count: int, clients: int = 1) -> bool:
    return are_connected(cluster.replicas(deployment), count, clients)
