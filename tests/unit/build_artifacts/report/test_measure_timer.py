from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from build_artifacts.report.measure import (
    BLOCKS,
    MIN_RUNS,
    InterleavedTimer,
    fit_runs,
    split_runs,
)
from deployments.batching.batch_policy import collate
from deployments.engines.base import EngineInfo
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import EngineFailed
from tests.support.fakes import TIMEOUT_S, item

SHORT, LONG = collate([item(1, 32)]), collate([item(1, 64)])


@dataclass
class PassLog:
    """Clock that advances only in forward passes, and the names of the engines in run order."""

    now_s: float = 0.0
    order: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s


@dataclass
class TimedRunner:
    """Engine that takes `ms` per 32 tokens and fails from batch number `fails_at`."""

    name: str
    log: PassLog
    ms: float
    fails_at: int | None = None
    passes: int = 0
    info: EngineInfo = field(default_factory=lambda: EngineInfo(compute_type="cpu-fake"))

    def run(self, batch: Batch) -> Outputs:
        self.passes += 1
        if self.fails_at is not None and self.passes >= self.fails_at:
            raise EngineFailed("out of breath")
        self.log.order.append(self.name)
        self.log.now_s += self.ms / 1e3 * batch.input_ids.shape[1] / 32
        return Outputs([])

    def close(self) -> None:
        raise AssertionError("bug: the timer closed an engine")


def build_timer(log: PassLog, *runners: TimedRunner) -> InterleavedTimer:
    return InterleavedTimer({r.name: r for r in runners}, clock=log.clock, wait=lambda: None)


@pytest.mark.parametrize(
    ("runs", "blocks"),
    [(50, (10, 10, 10, 10, 10)), (7, (1, 1, 2, 1, 2)), (5, (1,) * 5), (2, (1, 1)), (1, (1,))],
)
def test_runs_are_split_into_blocks(runs: int, blocks: tuple[int, ...]) -> None:
    assert split_runs(runs) == blocks


@pytest.mark.parametrize(
    ("runs", "budget_s", "expected_runs"),
    [
        (50, 55.0, 50),  # exactly enough for 50 runs and a warm-up in each of 5 blocks
        (50, 1e9, 50),
        (50, 30.0, 30 - BLOCKS),
        (50, 3.0, MIN_RUNS),
        (50, -1.0, MIN_RUNS),
        (3, 0.0, 3),
    ],
)
def test_fit_runs_limits_runs_to_the_budget(runs: int, budget_s: float, expected_runs: int) -> None:
    assert fit_runs(runs, 1.0, budget_s) == expected_runs


def test_engines_alternate_in_blocks_with_rotating_start() -> None:
    log = PassLog()
    build_timer(log, TimedRunner("a", log, 1), TimedRunner("b", log, 1)).time_latencies(
        {32: SHORT}, 10, 60.0
    )
    turns = [log.order[0]]
    for name in log.order:
        if name != turns[-1]:
            turns.append(name)
    # Warm-up: a b. Five blocks: ab, ba, ab, ba, ab. Adjacent turns of one engine are merged.
    assert turns == ["a", "b", "a", "b", "a", "b", "a", "b"]
    assert log.order.count("a") == log.order.count("b") == 3 + 5 * (1 + 2)


def test_latencies_have_each_engine_and_length() -> None:
    log = PassLog()
    timer = build_timer(log, TimedRunner("slow", log, 8.0), TimedRunner("fast", log, 2.0))
    results = timer.time_latencies({64: LONG, 32: SHORT}, 50, 60.0)
    assert [one.tokens for one in results["slow"]] == [32, 64]
    assert [one.mean_ms for one in results["slow"]] == pytest.approx([8.0, 16.0])
    assert [one.mean_ms for one in results["fast"]] == pytest.approx([2.0, 4.0])
    assert {one.runs for times in results.values() for one in times} == {50}


def test_shorter_budget_reduces_runs_of_all_engines_equally() -> None:
    log = PassLog()
    timer = build_timer(log, TimedRunner("a", log, 30.0), TimedRunner("b", log, 10.0))
    results = timer.time_latencies({32: SHORT, 64: LONG}, 50, 3.0)
    runs = {name: [one.runs for one in times] for name, times in results.items()}
    assert runs["a"] == runs["b"]
    assert all(MIN_RUNS < count < 50 for count in runs["a"])
    assert log.now_s == pytest.approx(3.0, abs=0.2)


def test_zero_budget_has_minimum_runs() -> None:
    log = PassLog()
    results = build_timer(log, TimedRunner("a", log, 10.0)).time_latencies({32: SHORT}, 50, 0.0)
    assert [one.runs for one in results["a"]] == [MIN_RUNS]


@pytest.mark.parametrize("at", [1, 4, 20])
def test_failed_engine_is_dropped_and_others_continue(at: int) -> None:
    log = PassLog()
    timer = build_timer(
        log,
        TimedRunner("weak", log, 1.0, fails_at=at),
        TimedRunner("sound", log, 1.0),
    )
    results = timer.time_latencies({32: SHORT}, 50, 60.0)
    assert list(results) == ["sound"]
    assert results["sound"][0].runs == 50
    assert timer.failed == {"weak": "out of breath"}


class ConcurrentRunner:
    """Engine whose batches wait until `passes` of them run. Together they take `seconds`."""

    info = EngineInfo(compute_type="cpu-fake")

    def __init__(self, log: PassLog, seconds: float, passes: int) -> None:
        self.most = 0  # highest concurrency
        self._log = log
        self._seconds = seconds
        self._now = 0
        self._lock = threading.Lock()
        self._together = threading.Barrier(passes, self._advance, TIMEOUT_S)

    def _advance(self) -> None:
        self._log.now_s += self._seconds

    def run(self, batch: Batch) -> Outputs:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._together.wait()
        with self._lock:
            self._now -= 1
        return Outputs([])

    def close(self) -> None:
        raise AssertionError("bug: the timer closed an engine")


def test_throughput_counts_items_of_concurrent_batches() -> None:
    batch = collate([item(1, 16)] * 4)
    log = PassLog()
    together, alone = ConcurrentRunner(log, 0.02, passes=3), ConcurrentRunner(log, 0.02, passes=1)
    timer = InterleavedTimer(
        {"together": together, "alone": alone}, clock=log.clock, wait=lambda: None
    )
    results = timer.time_throughputs(batch, {"together": 3, "alone": 1}, 0.9)
    assert (together.most, alone.most) == (3, 1)
    assert results["together"].passes == 3
    assert (results["alone"].items, results["alone"].tokens) == (4, 16)
    assert results["alone"].items_per_s == pytest.approx(4 / 0.02)
    assert results["together"].items_per_s == pytest.approx(3 * 4 / 0.02)


def test_throughput_with_zero_budget_counts_first_round() -> None:
    log = PassLog()
    timer = InterleavedTimer(
        {"a": ConcurrentRunner(log, 0.01, passes=1)}, clock=log.clock, wait=lambda: None
    )
    results = timer.time_throughputs(SHORT, {"a": 1}, 0.0)
    assert results["a"].rounds == 1
    assert results["a"].items_per_s == pytest.approx(100)


def test_failed_engine_has_no_throughput() -> None:
    log = PassLog()
    timer = build_timer(
        log, TimedRunner("weak", log, 1.0, fails_at=1), TimedRunner("sound", log, 1.0)
    )
    assert list(timer.time_throughputs(SHORT, {"weak": 2, "sound": 2}, 1.0)) == ["sound"]
    assert timer.failed == {"weak": "out of breath"}
