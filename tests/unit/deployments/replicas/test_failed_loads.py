from __future__ import annotations

import time

import pytest

from deployments.errors import EngineFailed, ModelUnavailable, RequirementMissing
from deployments.health import MIN_QUARANTINE_S
from deployments.messages import ModelRef
from deployments.replicas.failed_loads import FailedLoads
from tests.support.fakes import FakeClock


def test_reason_that_clients_do_not_get_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = RequirementMissing("TensorRT cannot be loaded: no libnvinfer.so.10")
    error.__cause__ = OSError("no libnvinfer.so.10")
    ref = ModelRef("tiny/embedder", "0123456789ab")
    assert "libnvinfer" not in FailedLoads(time.monotonic).add(ref, error).message
    (record,) = caplog.records
    assert record.message == f"model {ref.name} cannot be loaded: {error.message}"


def test_lack_of_memory_delays_pinned_models_only_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    failures, ref = FailedLoads(clock), ModelRef("tiny/embedder", "0123456789ab")
    for _ in range(3):
        failures.add(ref, ModelUnavailable("no memory is free"))
    assert [record.message for record in caplog.records] == [
        f"model {ref.name} cannot be loaded: no memory is free"
    ]
    assert failures.find(ref) is None  # calls try again
    assert failures.delays(ref)
    clock.now_s += 4 * MIN_QUARANTINE_S
    assert not failures.delays(ref)
    failures.forget(ref)
    failures.add(ref, ModelUnavailable("no memory is free"))
    assert len(caplog.records) == 2


def test_lack_of_memory_and_failures_do_not_lengthen_each_others_delay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    failures, ref = FailedLoads(clock), ModelRef("tiny/embedder", "0123456789ab")
    for _ in range(5):
        failures.add(ref, ModelUnavailable("no memory is free"))
    failures.add(ref, EngineFailed("broken"))
    clock.now_s += MIN_QUARANTINE_S
    assert failures.find(ref) is None
    failures.add(ref, ModelUnavailable("no memory is free again"))
    assert caplog.messages[-1].endswith("no memory is free again")


def test_other_failures_delay_calls_too() -> None:
    failures, ref = FailedLoads(FakeClock()), ModelRef("tiny/embedder", "0123456789ab")
    failures.add(ref, EngineFailed("broken"))
    assert isinstance(failures.find(ref), EngineFailed)
    assert failures.delays(ref)
