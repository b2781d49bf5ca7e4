"""Health of a worker: quarantine after failures, probes, and calls that hang."""

import pytest

from deployments.errors import EngineFailed, EngineLost, ModelUnavailable
from deployments.health import (
    HANG_TIMEOUT_S as HANG_S,
)
from deployments.health import (
    MAX_CONSECUTIVE_FAILURES,
    MAX_FAILED_PROBES,
    MAX_QUARANTINE_S,
    MIN_QUARANTINE_S,
    WorkerHealth,
    check_workers,
)
from tests.support.fakes import FakeClock


def test_check_passes_for_an_idle_worker() -> None:
    WorkerHealth("model").check(HANG_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr("deployments.health.time.perf_counter", clock)
    return clock


def quarantined() -> WorkerHealth:
    worker = WorkerHealth("model")
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        worker.admit()
        worker.record_failure()
    return worker


def test_model_is_quarantined_until_a_probe_succeeds(clock: FakeClock) -> None:
    worker = quarantined()
    with pytest.raises(ModelUnavailable, match=f"model failed {MAX_CONSECUTIVE_FAILURES} times"):
        worker.admit()
    clock.now_s += MIN_QUARANTINE_S
    worker.admit()
    with pytest.raises(ModelUnavailable):
        worker.admit()  # while the probe runs
    worker.record_success()
    worker.admit()
    worker.admit()
    check_workers([worker], HANG_S)


def test_failed_probe_doubles_the_quarantine(clock: FakeClock) -> None:
    worker = quarantined()
    pauses = []
    for _ in range(8):
        with pytest.raises(ModelUnavailable) as raised:
            worker.admit()
        assert raised.value.retry_after_s is not None
        pauses.append(raised.value.retry_after_s)
        clock.now_s += raised.value.retry_after_s
        worker.admit()
        worker.record_failure()
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_success_ends_the_count_of_failed_probes(clock: FakeClock) -> None:
    worker = quarantined()
    for _ in range(3):
        clock.now_s += MAX_QUARANTINE_S
        worker.admit()
        worker.record_failure()
    clock.now_s += MAX_QUARANTINE_S
    worker.admit()
    worker.record_success()
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        worker.admit()
        worker.record_failure()
    with pytest.raises(ModelUnavailable) as raised:
        worker.admit()
    assert raised.value.retry_after_s == MIN_QUARANTINE_S
    assert worker.failed_probes == 0


def test_probe_without_outcome_is_followed_by_another(clock: FakeClock) -> None:
    worker = quarantined()
    for _ in range(3):
        clock.now_s += MIN_QUARANTINE_S
        worker.admit()
        with pytest.raises(ModelUnavailable):
            worker.admit()


def test_replica_is_replaced_only_if_no_other_model_works(clock: FakeClock) -> None:
    failing, other = WorkerHealth("failing"), WorkerHealth("other")
    for _ in range(MAX_CONSECUTIVE_FAILURES + MAX_FAILED_PROBES):
        check_workers([failing, other], HANG_S)
        clock.now_s += MAX_QUARANTINE_S
        failing.admit()
        failing.record_failure()
    with pytest.raises(EngineFailed, match="failing: the last 5 probes failed"):
        check_workers([failing, other], HANG_S)
    other.record_success()
    check_workers([failing, other], HANG_S)


def test_check_fails_for_good_after_engine_lost() -> None:
    worker = WorkerHealth("model")
    worker.record_failure(EngineLost("the process ended"))
    worker.record_success()
    with pytest.raises(EngineLost, match="the process ended"):
        worker.check(HANG_S)


def test_check_fails_while_a_call_hangs(clock: FakeClock) -> None:
    worker = WorkerHealth("model")
    with worker.running():
        clock.now_s += HANG_S
        worker.check(HANG_S)
        clock.now_s += 0.1
        with pytest.raises(EngineFailed, match="model: a call has run for 10 s; the limit is 10 s"):
            worker.check(HANG_S)
    worker.check(HANG_S)


def test_call_that_hangs_beside_calls_that_work_is_found(clock: FakeClock) -> None:
    worker = WorkerHealth("model")
    with worker.running():
        for _ in range(20):
            with worker.running():
                clock.now_s += 1
        with pytest.raises(EngineFailed, match="has run for 20 s"):
            worker.check(HANG_S)


def test_long_call_of_a_slow_worker_is_no_hang(clock: FakeClock) -> None:
    """Small calls predict how long a large one may take."""
    worker = WorkerHealth("model")
    with worker.running(size=512):
        clock.now_s += 1.5
    with worker.running(size=2_048):
        clock.now_s += 23
        worker.check(HANG_S)
        clock.now_s += 2
        with pytest.raises(EngineFailed, match="the limit is 24 s"):
            worker.check(HANG_S)


def test_fast_call_after_a_slow_call_does_not_shorten_the_limit_at_once(clock: FakeClock) -> None:
    worker = WorkerHealth("model")
    for took_s in (1.5, 0.01):
        with worker.running(size=512):
            clock.now_s += took_s
    with worker.running(size=2_048):
        clock.now_s += 22
        worker.check(HANG_S)


@pytest.mark.parametrize(
    ("size", "took_s", "limit_s"),
    [
        (8, 0.1, HANG_S),
        (8, 0.5, 16),  # not 512 s: sizes below MIN_PACE_SIZE count as MIN_PACE_SIZE
        (2_048, 60.0, 3 * HANG_S),  # the maximum for every call
    ],
)
def test_limit_of_a_long_call_is_bounded(
    size: int, took_s: float, limit_s: float, clock: FakeClock
) -> None:
    worker = WorkerHealth("model")
    with worker.running(size):
        clock.now_s += took_s
    with worker.running(size=2_048):
        clock.now_s += limit_s - 0.1
        worker.check(HANG_S)
        clock.now_s += 0.2
        with pytest.raises(EngineFailed, match=f"the limit is {limit_s:.0f} s"):
            worker.check(HANG_S)


def test_stall_of_one_call_is_forgotten(clock: FakeClock) -> None:
    worker = WorkerHealth("model")
    with worker.running():
        clock.now_s += 1_000
    for _ in range(200):
        with worker.running():
            clock.now_s += 0.01
    with worker.running():
        clock.now_s += HANG_S + 0.1
        with pytest.raises(EngineFailed):
            worker.check(HANG_S)
