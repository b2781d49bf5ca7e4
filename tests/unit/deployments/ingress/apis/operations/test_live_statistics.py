"""Tests of GET /stats, of the request records, and of the load read from metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.config import LimitSettings
from deployments.ingress.admission import Admission
from deployments.ingress.apis.operations.live_statistics import (
    MAX_AGE_S,
    MAX_LOAD_AGE_S,
    MAX_REQUESTS,
    WINDOW_S,
    LiveStatisticsReader,
    RecentRequests,
    read_load,
)
from deployments.ingress.devices.cluster_state import ClusterMonitor, ClusterSnapshot, ReplicaTarget
from deployments.messages import CallTimings
from deployments.records import RequestRecord
from tests.support.artifacts import CLASSIFIER, EMBEDDER
from tests.support.fakes import FakeClock
from tests.support.in_process import InProcess

EXPOSITION = """\
hundredfold_busy_ratio{deployment="CpuEncoder",replica="a"} 0.25
hundredfold_busy_ratio{deployment="CpuEncoder",replica="b"} 0.75
hundredfold_queued_seconds{deployment="CpuEncoder",replica="a"} 0.5
hundredfold_queued_seconds{deployment="CpuEncoder",replica="b"} 1.5
hundredfold_requests_total{model="x"} 7
"""


def record(model: str = EMBEDDER, total_s: float = 0.01, **fields: object) -> RequestRecord:
    return RequestRecord(
        **{"task": "t", "compute": "cpu", "status": 200, "items": 1, **fields},
        model=model,
        total_s=total_s,
    )


class Scraped:
    """A scrape that returns EXPOSITION later and counts its calls. It raises `error`, if set."""

    def __init__(self) -> None:
        self.count = 0
        self.error: Exception | None = None

    async def __call__(self) -> str:
        self.count += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return EXPOSITION


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def recent(clock: FakeClock) -> RecentRequests:
    return RecentRequests(clock)


@pytest.fixture
def scraped() -> Scraped:
    return Scraped()


@pytest.fixture
async def reader(
    recent: RecentRequests, clock: FakeClock, scraped: Scraped
) -> LiveStatisticsReader:
    snapshot = ClusterSnapshot(
        {"CpuEncoder": 2, "Tokenizer": 1},
        starting={"CpuEncoder": 1},
        targets={"CpuEncoder": ReplicaTarget(3, 1, 8)},
    )
    monitor = ClusterMonitor({}, lambda: snapshot)
    await monitor.refresh()
    return LiveStatisticsReader(recent, monitor, Admission(LimitSettings()), scraped, clock)


async def test_without_requests_nothing_is_divided(reader: LiveStatisticsReader) -> None:
    stats = await reader.read()
    assert stats["requests_per_s"] == stats["tokens_per_s"] == 0
    assert stats["failed_ratio"] is stats["cache_hit_ratio"] is stats["latency_ms"]["p50"] is None
    assert stats["models"] == []


async def test_requests_are_summarized_by_model(
    reader: LiveStatisticsReader, recent: RecentRequests, clock: FakeClock
) -> None:
    clock.now_s += 10
    for milliseconds in range(1, 101):
        timings = CallTimings(queue_s=milliseconds / 2e3, tokens=5)
        recent.record(record(total_s=milliseconds / 1e3, timings=timings, cache="miss"))
    recent.record(record(CLASSIFIER, cache="hit", timings=CallTimings(tokens=9)))
    recent.record(record(CLASSIFIER, status=504))
    recent.record(record("none", status=401))
    stats = await reader.read()
    assert stats["window_s"] == 10
    assert stats["requests_per_s"] == pytest.approx(10.3)
    assert stats["tokens_per_s"] == pytest.approx(50)
    assert stats["cache_hit_ratio"] == pytest.approx(1 / 101)
    assert stats["failed_ratio"] == pytest.approx(2 / 103)
    assert stats["queue_ms"]["p99"] == pytest.approx(49.5, abs=0.1)
    busiest, other = stats["models"]
    assert (busiest["id"], other["id"]) == (EMBEDDER, CLASSIFIER)
    assert busiest["latency_ms"] == {"p50": 50.5, "p90": 90.1, "p99": 99.01}
    assert other["failed_ratio"] == 0.5


async def test_deployments_have_replicas_and_load(reader: LiveStatisticsReader) -> None:
    stats = await reader.read()
    assert stats["deployments"] == {
        "CpuEncoder": {
            "running": 2,
            "starting": 1,
            "scaling": {"target": 3, "min": 1, "max": 8},
            "busy_ratio": 0.5,
            "queued_s": 1.5,
        },
        "Tokenizer": {
            "running": 1,
            "starting": 0,
            "scaling": None,
            "busy_ratio": None,
            "queued_s": None,
        },
    }


async def test_answers_are_computed_once_a_second(
    reader: LiveStatisticsReader, recent: RecentRequests, clock: FakeClock, scraped: Scraped
) -> None:
    first = await reader.read()
    recent.record(record())
    assert await reader.read() is first
    clock.now_s += MAX_AGE_S
    assert (await reader.read())["requests_per_s"] > 0
    assert scraped.count == 1
    clock.now_s += MAX_LOAD_AGE_S
    await reader.read()
    assert scraped.count == 2


async def test_requests_during_the_first_scrape_wait_for_its_load(
    reader: LiveStatisticsReader, scraped: Scraped
) -> None:
    first, second = await asyncio.gather(reader.read(), reader.read())
    assert second is first
    assert second["deployments"]["CpuEncoder"]["busy_ratio"] == 0.5
    assert scraped.count == 1


async def test_failed_scrape_omits_the_load_until_the_next_one(
    reader: LiveStatisticsReader, clock: FakeClock, scraped: Scraped
) -> None:
    await reader.read()
    scraped.error = ConnectionError("the GCS does not answer")
    clock.now_s += MAX_LOAD_AGE_S
    encoder = (await reader.read())["deployments"]["CpuEncoder"]
    assert (encoder["running"], encoder["busy_ratio"], encoder["queued_s"]) == (2, None, None)
    scraped.error = None
    clock.now_s += MAX_LOAD_AGE_S
    assert (await reader.read())["deployments"]["CpuEncoder"]["busy_ratio"] == 0.5
    assert scraped.count == 3


def test_old_requests_are_forgotten(recent: RecentRequests, clock: FakeClock) -> None:
    recent.record(record())
    clock.now_s += WINDOW_S / 2
    recent.record(record())
    clock.now_s += WINDOW_S / 2 + 1
    requests, seconds = recent.read()
    assert (len(requests), seconds) == (1, WINDOW_S)


def test_rates_of_a_busy_server_are_those_of_the_kept_requests(
    recent: RecentRequests, clock: FakeClock
) -> None:
    clock.now_s += 100
    for _ in range(MAX_REQUESTS):
        recent.record(record())
    clock.now_s += 4
    requests, seconds = recent.read()
    assert (len(requests), seconds) == (MAX_REQUESTS, 4)


def test_load_is_read_by_deployment() -> None:
    assert read_load(EXPOSITION) == {
        "busy_ratio": {"CpuEncoder": [0.25, 0.75]},
        "queued_seconds": {"CpuEncoder": [0.5, 1.5]},
    }


async def test_route_counts_requests_of_every_api(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        await http.post(f"/models/{EMBEDDER}", json={"inputs": "a"})
        stats = (await http.get("/stats")).json()
    assert [model["id"] for model in stats["models"]] == [EMBEDDER]
    assert stats["in_flight"] == {"texts": 0, "generations": 0}
