"""The load generator: a closed loop over keep-alive connections, with figures of its own cost.

It shares the cores with the server it measures, so every microsecond here is one the server does
not get. One process, one event loop, a bare protocol per connection; requests are bytes built
before the clock starts, and answers are parsed only as far as their end and their status. Bodies
that will be checked are kept as they came and read after the clock has stopped.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import httptools
import numpy as np
from numpy.typing import NDArray

from benchmarks.common.http import ServerAddress

RECONNECT_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How one phase loads the server."""

    connections: int
    seconds: float  # the measured window
    warm_up_s: float = 1.0  # the same load before it, not measured
    drain_s: float = 30.0  # how long the last answers may take after it


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One phase. `failures` counts statuses other than 200, by number, and lost requests, by name.

    Failures count from the first request to the last, the rest within the window only.
    """

    connections: int
    seconds: float
    latencies_s: NDArray[np.float64]  # of the answers with status 200
    failures: Mapping[str, int]
    cpu_s: float  # of this process

    @property
    def requests_per_s(self) -> float:
        """Good answers per second."""
        return len(self.latencies_s) / self.seconds


class Workload:
    """Requests, taken in turn by whichever connection is free; goes on where it stopped.

    The first answer to each of the `kept` requests is stored in `answers`, head and body as they
    came, by index.
    """

    def __init__(self, requests: Sequence[bytes], kept: Collection[int] = ()) -> None:
        self.answers: dict[int, bytes] = {}
        self._requests = requests
        self._wanted = set(kept)
        self._next = 0

    def take(self) -> tuple[int, bytes]:
        """The next request and its index."""
        index = self._next
        self._next = index + 1 if index + 1 < len(self._requests) else 0
        return index, self._requests[index]

    def claim(self, index: int) -> bool:
        """Whether the answer to this request is to be kept; true once per index."""
        if index not in self._wanted:
            return False
        self._wanted.discard(index)
        return True


async def run_load(target: ServerAddress, workload: Workload, plan: LoadPlan) -> LoadResult:
    """Load `target` for one warm-up and one window; ends by itself whatever the server does."""
    begin_s = time.perf_counter() + plan.warm_up_s
    recorder = _Recorder(begin_s, begin_s + plan.seconds)
    fleet = [
        asyncio.create_task(_stay_connected(target, workload, recorder))
        for _ in range(plan.connections)
    ]
    await asyncio.sleep(recorder.begin_s - time.perf_counter())
    cpu_before_s = time.process_time()
    await asyncio.sleep(recorder.end_s - time.perf_counter())
    cpu_s = time.process_time() - cpu_before_s
    finished, late = await asyncio.wait(fleet, timeout=plan.drain_s)
    for connection in late:
        connection.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for connection in finished:
        connection.result()
    return LoadResult(
        connections=plan.connections,
        seconds=plan.seconds,
        latencies_s=np.array(recorder.latencies_s),
        failures=dict(recorder.failures),
        cpu_s=cpu_s,
    )


class _Recorder:
    """What all connections of a phase write to. Times are time.perf_counter."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s = begin_s
        self.end_s = end_s
        self.latencies_s = array("d")
        self.failures: Counter[str] = Counter()


async def _stay_connected(target: ServerAddress, workload: Workload, recorder: _Recorder) -> None:
    """One client: connected until the window is over, again after every loss."""
    loop = asyncio.get_running_loop()
    while time.perf_counter() < recorder.end_s:
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(workload, recorder, loop.create_future()),
                target.host,
                target.port,
            )
        except OSError:
            recorder.failures["not_connected"] += 1
            await asyncio.sleep(RECONNECT_PAUSE_S)
            continue
        try:
            # Shielded, because the protocol itself completes the future when it is aborted.
            await asyncio.shield(connection.closed)
        finally:
            connection.abandon()


class _Connection(asyncio.Protocol):
    """One request at a time: the next is written while the last one's answer is being parsed."""

    __slots__ = ("_kept", "_parser", "_recorder", "_request", "_sent_s", "_transport", "_workload",
                 "closed")  # fmt: skip

    def __init__(
        self, workload: Workload, recorder: _Recorder, closed: asyncio.Future[None]
    ) -> None:
        self.closed = closed
        self._workload = workload
        self._recorder = recorder
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._request: int | None = None  # the one under way
        self._sent_s = 0.0
        self._kept: list[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A promise, not a check: uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        if self._kept is not None:
            self._kept.append(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("not_http")

    def on_message_complete(self) -> None:
        """Called by the parser at the end of an answer."""
        now_s = time.perf_counter()
        recorder = self._recorder
        status = self._parser.get_status_code()
        if status != 200:
            recorder.failures[str(status)] += 1
        elif recorder.begin_s <= now_s < recorder.end_s:
            recorder.latencies_s.append(now_s - self._sent_s)
        if self._kept is not None:
            if status == 200 and self._request is not None:
                self._workload.answers[self._request] = b"".join(self._kept)
            self._kept = None
        self._request = None
        if now_s < recorder.end_s and self._parser.should_keep_alive():
            self._send()
        elif self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("connection_lost")
        if not self.closed.done():
            self.closed.set_result(None)

    def abandon(self) -> None:
        """Close at once; an answer still missing has come too late."""
        self._fail("no_answer")

    def _send(self) -> None:
        assert self._transport is not None, "this is a bug: not connected"
        self._request, request = self._workload.take()
        if self._workload.claim(self._request):
            self._kept = []
        self._sent_s = time.perf_counter()
        self._transport.write(request)

    def _fail(self, reason: str) -> None:
        if self._request is not None:
            self._recorder.failures[reason] += 1
            self._request = None
        if self._transport is not None:
            self._transport.abort()
