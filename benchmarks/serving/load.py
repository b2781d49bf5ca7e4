"""Load generator: a closed loop over keep-alive connections that measures its own CPU time.

The load generator shares the cores with the server, so its CPU time lowers the result. It
builds the requests before the timing. During the timing, it parses only the status and the end of
each response. It stores sampled responses as raw bytes, which are checked afterwards.
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
    """Connections and durations of one phase of load."""

    connections: int
    seconds: float  # duration of the measured window
    warm_up_s: float = 1.0  # duration of the same load before the window, not measured
    drain_s: float = 30.0  # maximum wait for the last responses after the window


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Results of one phase.

    `failures` counts statuses other than 200 and lost requests by reason, including the warm-up.
    All other values cover the measured window only.
    """

    connections: int
    seconds: float
    latencies_s: NDArray[np.float64]  # latencies of the responses with status 200
    failures: Mapping[str, int]
    cpu_s: float  # CPU time of this process, the load generator

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies_s) / self.seconds


class Workload:
    """Endless cycle of requests that all connections share.

    A later phase of load continues where the previous phase ended. `responses` maps the
    index of each request of `sample` to the raw response to its first use. It lacks requests whose
    first use did not end with status 200.
    """

    def __init__(self, requests: Sequence[bytes], sample: Collection[int] = ()) -> None:
        self.responses: dict[int, bytes] = {}
        self.taken = 0  # number of requests in all phases so far, including warm-ups
        self._requests = requests
        self._unclaimed = set(sample)

    def take(self) -> tuple[int, bytes]:
        """Return the index and the bytes of the next request."""
        index = self.taken % len(self._requests)
        self.taken += 1
        return index, self._requests[index]

    def claim_sample(self, index: int) -> bool:
        """Return whether to store the next response to request `index`.

        The result is True only for the first call with each index of the sample.
        """
        if index not in self._unclaimed:
            return False
        self._unclaimed.discard(index)
        return True


async def run_load(address: ServerAddress, workload: Workload, plan: LoadPlan) -> LoadResult:
    """Run one warm-up and one window. End at most `drain_s` after the window."""
    begin_s = time.perf_counter() + plan.warm_up_s
    recorder = _LoadRecorder(begin_s, begin_s + plan.seconds)
    clients = [
        asyncio.create_task(_run_client(address, workload, recorder))
        for _ in range(plan.connections)
    ]
    await asyncio.sleep(recorder.begin_s - time.perf_counter())
    cpu_before_s = time.process_time()
    await asyncio.sleep(recorder.end_s - time.perf_counter())
    cpu_s = time.process_time() - cpu_before_s
    finished, expired = await asyncio.wait(clients, timeout=plan.drain_s)
    for client in expired:
        client.cancel()
    await asyncio.gather(*expired, return_exceptions=True)
    for client in finished:
        client.result()
    return LoadResult(
        connections=plan.connections,
        seconds=plan.seconds,
        latencies_s=np.array(recorder.latencies_s),
        failures=dict(recorder.failures),
        cpu_s=cpu_s,
    )


class _LoadRecorder:
    """Measurements of all connections of a phase. `begin_s` and `end_s` use time.perf_counter."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s = begin_s
        self.end_s = end_s
        self.latencies_s = array("d")
        self.failures: Counter[str] = Counter()


async def _run_client(address: ServerAddress, workload: Workload, recorder: _LoadRecorder) -> None:
    """Keep one connection open until the window ends. Reconnect after a loss.

    Connect at least once, even if the event loop gets to it only after a short window.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            _, connection = await loop.create_connection(
                lambda: _ClosedLoopConnection(workload, recorder, loop.create_future()),
                address.host,
                address.port,
            )
        except OSError:
            recorder.failures["not_connected"] += 1
            await asyncio.sleep(RECONNECT_PAUSE_S)
        else:
            try:
                # The shield keeps `closed` pending until the connection ends, even on cancellation.
                await asyncio.shield(connection.closed)
            finally:
                connection.abandon()
        if time.perf_counter() >= recorder.end_s:
            return


class _ClosedLoopConnection(asyncio.Protocol):
    """Connection with one request at a time. `on_message_complete` sends the next request."""

    __slots__ = (
        "_parser",
        "_recorder",
        "_request",
        "_sent_s",
        "_stored",
        "_transport",
        "_workload",
        "closed",
    )  # fmt: skip

    def __init__(
        self, workload: Workload, recorder: _LoadRecorder, closed: asyncio.Future[None]
    ) -> None:
        self.closed = closed
        self._workload = workload
        self._recorder = recorder
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._request: int | None = None  # index of the request in flight
        self._sent_s = 0.0
        self._stored: list[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio.Transport, so isinstance would fail.
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        if self._stored is not None:
            self._stored.append(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("not_http")

    def on_message_complete(self) -> None:
        """Record the response and send the next request. The parser calls this method."""
        now_s = time.perf_counter()
        recorder = self._recorder
        status = self._parser.get_status_code()
        if status != 200:
            recorder.failures[str(status)] += 1
        elif recorder.begin_s <= now_s < recorder.end_s:
            recorder.latencies_s.append(now_s - self._sent_s)
        if self._stored is not None:
            if status == 200 and self._request is not None:
                self._workload.responses[self._request] = b"".join(self._stored)
            self._stored = None
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
        """Close the connection and count a missing response as a failure."""
        self._fail("no_answer")

    def _send(self) -> None:
        assert self._transport is not None, "bug: sending without a connection"
        self._request, request = self._workload.take()
        if self._workload.claim_sample(self._request):
            self._stored = []
        self._sent_s = time.perf_counter()
        self._transport.write(request)

    def _fail(self, reason: str) -> None:
        if self._request is not None:
            self._recorder.failures[reason] += 1
            self._request = None
        if self._transport is not None:
            self._transport.abort()
