"""Load of every kind on a running cluster while a fault is caused. Every answer is checked."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from subprocess import DEVNULL
from typing import Any, NamedTuple

import httpx
import psutil

from tests.support.cluster_load import embed
from tests.support.ray_cluster import Cluster
from tests.support.served_models import EMBEDDER, WRITER
from tests.support.waiting import wait_for

COMPLETIONS = "/v1/completions"
SENTENCES = [f"A sentence of middling length, number {number}." for number in range(8)]
DONE = "[DONE]"  # ends a stream
RIGHT = "right"
WRONG = "wrong"
TIMEOUT_S = 150.0  # s without a byte after which a client gives up; the server answers earlier
RECOVERY_S = 300.0  # maximum s from a fault to the recovery
POLL_S = 0.01
# A slowed process runs for RUN_S and is stopped for STAND_S in turns. The channel client counts a
# replica as lost after LOST_S of silence. The launcher kills a process that is stopped for half a
# second. STAND_S is far below both limits, because a busy host lengthens every stop.
RUN_S, STAND_S = 0.025, 0.2
ALTERNATE = f'while :; do kill -CONT "$@"; sleep {RUN_S}; kill -STOP "$@"; sleep {STAND_S}; done'
TOLERANCE = 1e-3  # maximum of 1 - cosine; other texts in the batch affect rounding


def noise(tokens: int) -> dict[str, Any]:
    """Build a request for exactly `tokens` tokens. The answer is the same in every run."""
    body = {"model": WRITER, "prompt": "the rain", "max_tokens": tokens, "min_tokens": tokens}
    return {**body, "seed": 1}


class Seen(NamedTuple):
    """What a client saw. `outcome` is RIGHT, WRONG, a status, an error code or an httpx error."""

    outcome: str
    characters: int = 0  # length of the generated text


Send = Callable[[httpx.AsyncClient], Awaitable[Seen]]


@dataclass(frozen=True, slots=True)
class ObservedRequest:
    """One request under load."""

    kind: str
    seen: Seen
    started_s: float  # time.monotonic
    ended_s: float

    @property
    def is_right(self) -> bool:
        return self.seen.outcome == RIGHT


@dataclass(frozen=True, slots=True)
class ClientCounts:
    """Numbers of clients by kind. Each client sends its requests sequentially."""

    embeddings: int = 2
    completions: int = 2
    streams: int = 2
    tokens: int = 200  # per completion and stream
    long_streams: int = 0  # clients that read one long stream from the start of the load
    long_tokens: int = 12_000

    @property
    def count(self) -> int:
        return self.embeddings + self.completions + self.stream_count

    @property
    def stream_count(self) -> int:
        return self.streams + self.long_streams


@dataclass(frozen=True, slots=True)
class Scene:
    """All requests under load, and the time at which the fault was complete."""

    observations: tuple[ObservedRequest, ...]
    fault_s: float

    def of(self, *kinds: str) -> list[ObservedRequest]:
        return [one for one in self.observations if one.kind in kinds]

    def failed(self) -> list[ObservedRequest]:
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
    """Closed-loop clients of a cluster, with known right answers."""

    def __init__(self, cluster: Cluster, clients: ClientCounts) -> None:
        self._url = cluster.url
        self._clients = clients
        self._vectors: list[list[float]] = embed(cluster, SENTENCES).json()
        body = noise(clients.tokens)
        reply = httpx.post(cluster.url + COMPLETIONS, json=body, timeout=TIMEOUT_S)
        self._text: str = reply.json()["choices"][0]["text"]
        self._answered = 0  # clients with at least one answer
        self._open_streams = 0  # running streams with text

    async def run(self, fault: Callable[[], object], is_over: Callable[[], bool]) -> Scene:
        """Start the load, cause the fault, and wait for the recovery.

        The fault starts when each client of short requests has had an answer and each stream has
        text. The clients of short requests continue until `is_over` returns True. Each client then
        sends one more request, which starts after the fault. A client of a long stream sends one
        request.
        """
        over = asyncio.Event()
        senders = {
            "embedding": (self._embed, self._clients.embeddings),
            "completion": (self._complete, self._clients.completions),
            "stream": (self._stream, self._clients.streams),
        }
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S) as http,
            asyncio.TaskGroup() as group,
        ):
            tasks = [
                group.create_task(self._repeat(http, kind, send, over))
                for kind, (send, count) in senders.items()
                for _ in range(count)
            ]
            tasks += [
                group.create_task(self._observe(http, "long stream", self._stream_long))
                for _ in range(self._clients.long_streams)
            ]
            async with asyncio.timeout(TIMEOUT_S):
                while not self._is_under_way():
                    await asyncio.sleep(POLL_S)
            await asyncio.to_thread(fault)
            fault_s = time.monotonic()
            await asyncio.to_thread(wait_for, is_over, RECOVERY_S)
            over.set()
        return Scene(tuple(one for task in tasks for one in task.result()), fault_s)

    def _is_under_way(self) -> bool:
        has_answers = self._answered == self._clients.count - self._clients.long_streams
        return has_answers and self._open_streams == self._clients.stream_count

    async def _observe(
        self, http: httpx.AsyncClient, kind: str, send: Send
    ) -> list[ObservedRequest]:
        started_s = time.monotonic()
        try:
            seen = await send(http)
        except httpx.HTTPError as error:
            seen = Seen(type(error).__name__)
        return [ObservedRequest(kind, seen, started_s, time.monotonic())]

    async def _repeat(
        self, http: httpx.AsyncClient, kind: str, send: Send, over: asyncio.Event
    ) -> list[ObservedRequest]:
        observations = await self._observe(http, kind, send)
        self._answered += 1
        while not over.is_set():
            observations += await self._observe(http, kind, send)
        return observations + await self._observe(http, kind, send)

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
        """Run a long stream. Check only its beginning, because the rest of its text is unknown."""
        text, end = await self._read(http, self._clients.long_tokens)
        is_right = end == DONE and text.startswith(self._text)
        return Seen(RIGHT if is_right else f"cut: {end}", len(text))

    async def _read(self, http: httpx.AsyncClient, tokens: int) -> tuple[str, str]:
        """Read a stream. Return its text, and DONE or the reason of an early end."""
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
                    if not data or data.startswith(":"):  # a comment, while the client waits
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        return text, event["error"]["code"]
                    had_text = bool(text)
                    text += event["choices"][0]["text"]
                    self._open_streams += bool(text) - had_text
        except httpx.HTTPError as error:
            return text, type(error).__name__
        finally:
            self._open_streams -= bool(text)
        return text, "no end"

    def _compare(self, text: str) -> Seen:
        return Seen(RIGHT if text == self._text else WRONG, len(text))

    def _cut(self, text: str, error: str) -> Seen:
        """Check a stream that ended early: its text must be a prefix of the right text."""
        return Seen(error if self._text.startswith(text) else WRONG, len(text))


def _failure(reply: httpx.Response) -> Seen:
    try:
        error = reply.json()["error"]
        return Seen(f"{reply.status_code} {error['code'] if isinstance(error, dict) else error}")
    except (ValueError, KeyError, TypeError):
        return Seen(f"{reply.status_code} {reply.text[:60]!r}")


def changed(config: dict[str, Any], **changes: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the config with changed keys of the named deployments. Merge mappings."""
    config = copy.deepcopy(config)
    for deployment in config["applications"][0]["deployments"]:
        for key, value in changes.get(deployment["name"], {}).items():
            merged = isinstance(value, Mapping)
            deployment[key] = {**deployment[key], **value} if merged else value
    return config


def count_sockets(replicas: Iterable[psutil.Process]) -> Counter[str]:
    """Count the channel sockets by path. A replica has one listening socket, and one per client."""
    return Counter(
        str(connection.laddr)
        for replica in replicas
        for connection in replica.net_connections("unix")
        if str(connection.laddr).endswith("replica.sock")
    )


def has_channels(cluster: Cluster, deployment: str, count: int, clients: int = 1) -> bool:
    """Return whether `count` replicas run, each connected to all `clients` ingress replicas."""
    replicas = cluster.replicas(deployment)
    try:
        sockets = count_sockets(replicas)
    except psutil.Error:  # a replica ended during the count
        return False
    return len(replicas) == count and list(sockets.values()) == [1 + clients] * count


@contextmanager
def slowed(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """Let the processes run about a tenth of the time within the block.

    So the long streams of a slowed generator are still open at the end of the block. A shell sends
    the signals, because a thread of this process may wait for its turn longer than STAND_S.
    """
    pids = [str(process.pid) for process in processes]
    with subprocess.Popen(["sh", "-c", ALTERNATE, "sh", *pids], stderr=DEVNULL) as shell:
        try:
            yield
        finally:
            shell.kill()
            shell.wait()
            resume(processes)


@contextmanager
def stopped(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """Suspend the processes within the block. Skip processes that have ended."""
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        resume(processes)


def resume(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.resume()
