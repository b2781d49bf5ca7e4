"""Open-loop load generator in its own process: `python -m benchmarks.overload.open_loop`.

Requests are sent at random times and do not wait for earlier answers. The process reads an
OpenLoopPlan as JSON from standard input. It writes an OpenLoopResult as JSON to standard output.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import httptools
import orjson
import uvloop

from benchmarks.common.errors import BenchmarkError

# Requests that are due within this time are sent together, so a request may be this much late. The
# value is the resolution of uvloop's timers. One iteration of the event loop per request would use
# CPU time that the server needs.
_TICK_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoopPlan:
    """Plan of Poisson arrivals of `rate` requests per second. `requests` repeat in order."""

    host: str
    port: int
    requests: Sequence[str]  # raw HTTP requests, decoded as Latin-1
    rate: float
    seconds: float
    drain_s: float  # maximum wait for answers after the last arrival
    seed: int
    samples: int  # number of bodies to return, drawn by chance from the answers with status 200


@dataclass(slots=True)
class Exchange:
    """One request. Times are seconds since the first arrival was due."""

    request: int  # index of OpenLoopPlan.requests
    due_s: float
    sent_s: float | None = None  # None: no connection
    ended_s: float | None = None  # None: no answer
    status: int = 0  # 0: no answer
    body: str | None = None  # None if it was not sampled
    error: str | None = None  # why there is no connection, such as `ECONNREFUSED` or `EMFILE`


@dataclass(slots=True)
class OpenLoopResult:
    """All exchanges by due time, and the CPU time and the duration of the load generator."""

    exchanges: list[Exchange] = field(default_factory=list)
    cpu_s: float = 0.0
    elapsed_s: float = 0.0


def run_open_loop(plan: OpenLoopPlan) -> OpenLoopResult:
    """Run a plan in a child process. Raise BenchmarkError if it fails."""
    command = [sys.executable, "-m", "benchmarks.overload.open_loop"]
    with tempfile.TemporaryFile() as output:  # with a pipe, megabytes of output were once truncated
        done = subprocess.run(
            command, input=orjson.dumps(plan), stdout=output, stderr=subprocess.PIPE, check=False
        )
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip()[-300:]
            raise BenchmarkError(f"the load generator failed: {reason}", hint="see the message")
        output.seek(0)
        value = orjson.loads(output.read())
    exchanges = [Exchange(**each) for each in value["exchanges"]]
    return OpenLoopResult(exchanges, value["cpu_s"], value["elapsed_s"])


class _OpenLoopConnection(asyncio.Protocol):
    """One keep-alive connection with at most one exchange at a time."""

    def __init__(self, load: _OpenLoop, raw: bytes, exchange: Exchange) -> None:
        self._load = load
        self._raw, self._exchange = raw, exchange
        self._pending: Exchange | None = exchange
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.send(self._raw, self._exchange)

    def send(self, raw: bytes, exchange: Exchange) -> None:
        assert self._transport is not None, "bug: sending without a connection"
        self._pending, self._body = exchange, []
        exchange.sent_s = self._load.now_s()
        self._transport.write(raw)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def on_body(self, data: bytes) -> None:
        """Store a part of the body. The parser calls this method."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Record the end of the exchange. The parser calls this method after a response."""
        exchange, self._pending = self._pending, None
        keep = self._parser.should_keep_alive()
        if exchange is not None:
            exchange.ended_s = self._load.now_s()
            exchange.status = self._parser.get_status_code()
            if exchange.status == 200:
                self._load.sample.offer(exchange, self._body)
            self._load.finish()
        if keep:
            self._load.idle.append(self)
        else:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._load.idle:
            self._load.idle.remove(self)
        if self._pending is not None:
            self._pending = None
            self._load.finish()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Sample:
    """Bodies of up to `size` answers, drawn by chance from all answers (reservoir sampling).

    The first answers of a loop precede its overload, so they alone would prove nothing.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._chance = random.Random(seed)
        self._chosen: list[Exchange] = []
        self._offered = 0

    def offer(self, exchange: Exchange, body: Sequence[bytes]) -> None:
        """Store `body`, or not, so that every answer so far is chosen with equal probability."""
        self._offered += 1
        if len(self._chosen) < self._size:
            self._chosen.append(exchange)
        elif (place := self._chance.randrange(self._offered)) < self._size:
            self._chosen[place].body = None
            self._chosen[place] = exchange
        else:
            return
        exchange.body = b"".join(body).decode()


class _OpenLoop:
    """Load generator that sends the requests of a plan and records the exchanges."""

    def __init__(self, plan: OpenLoopPlan) -> None:
        self.idle: list[_OpenLoopConnection] = []
        self.sample = _Sample(plan.samples, plan.seed)
        self._plan = plan
        self._requests = [request.encode("latin-1") for request in plan.requests]
        self._open = 0
        self._changed = asyncio.Event()
        self._connecting: set[asyncio.Task[None]] = set()
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def finish(self) -> None:
        self._open -= 1
        self._changed.set()

    async def run(self) -> list[Exchange]:
        chance = random.Random(self._plan.seed)
        exchanges: list[Exchange] = []
        due_s = 0.0
        while due_s < self._plan.seconds:
            # Sleep even if the arrival is late, so that the event loop reads answers.
            await asyncio.sleep(max(due_s - self.now_s(), _TICK_S))
            due_until_s = min(self.now_s(), self._plan.seconds)
            while due_s <= due_until_s:
                exchange = Exchange(len(exchanges) % len(self._requests), due_s)
                exchanges.append(exchange)
                self._start(exchange)
                due_s += chance.expovariate(self._plan.rate)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._plan.drain_s):
                while self._open:
                    self._changed.clear()
                    await self._changed.wait()
        return exchanges

    def _start(self, exchange: Exchange) -> None:
        self._open += 1
        raw = self._requests[exchange.request]
        if self.idle:
            self.idle.pop().send(raw, exchange)
            return
        task = asyncio.ensure_future(self._connect(raw, exchange))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, raw: bytes, exchange: Exchange) -> None:
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: _OpenLoopConnection(self, raw, exchange), self._plan.host, self._plan.port
            )
        except OSError as exc:
            exchange.error = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
            self.finish()


def main() -> None:
    # An overloaded server may leave thousands of connections open. The usual soft limit is 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    plan = OpenLoopPlan(**orjson.loads(sys.stdin.buffer.read()))
    gc.disable()  # all exchanges live until the end, so collections would only traverse them
    cpu_s, started_s = time.process_time(), time.perf_counter()

    async def run() -> list[Exchange]:
        return await _OpenLoop(plan).run()

    exchanges = uvloop.run(run())
    result = OpenLoopResult(exchanges, time.process_time() - cpu_s, time.perf_counter() - started_s)
    sys.stdout.buffer.write(orjson.dumps(result))


if __name__ == "__main__":
    main()
