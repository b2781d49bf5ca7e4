"""Health of a worker."""

import pytest

from deployments import health
from deployments.errors import EngineFailed, EngineLost
from deployments.health import MAX_CONSECUTIVE_FAILURES, WorkerHealth


def test_check_passes_for_an_idle_worker() -> None:
    WorkerHealth("model").check()


def test_check_fails_after_consecutive_failures_until_a_success() -> None:
    worker = WorkerHealth("model")
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        worker.check()
        worker.record_failure()
    with pytest.raises(EngineFailed, match=f"model: the last {MAX_CONSECUTIVE_FAILURES} calls"):
        worker.check()
    worker.record_success()
    worker.check()


def test_check_fails_for_good_after_engine_lost() -> None:
    worker = WorkerHealth("model")
    worker.record_failure(EngineLost("the process ended"))
    worker.record_success()
    with pytest.raises(EngineLost, match="the process ended"):
        worker.check()


def test_check_fails_while_a_call_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WorkerHealth("model")
    monkeypatch.setattr(health, "HANG_TIMEOUT_S", 0.0)
    worker.check()
    with worker.running(), pytest.raises(EngineFailed, match="model: a call has run for"):
        worker.check()
    worker.check()
