from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.artifacts.types import Device
from deployments.config import EncoderSettings, ModelSettings
from deployments.errors import DeadlineExceeded, ModelLoading
from deployments.ingress.devices import cluster_state, cold_start
from deployments.ingress.devices.cluster_state import ClusterMonitor, ClusterSnapshot
from deployments.ingress.devices.cold_start import limit_cold_start
from deployments.registry import ModelRegistry, RegisteredModel
from tests.support.artifacts import EMBEDDER
from tests.support.fakes import TIMEOUT_S

WAIT_S = 0.02


@pytest.fixture(autouse=True)
def current_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a read of the state take long, and its result stay current, on a slow machine."""
    monkeypatch.setattr(cluster_state, "STATUS_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(cold_start, "REFRESH_STARTING_S", TIMEOUT_S)


@pytest.fixture
def model(tiny_store: Path) -> RegisteredModel:
    (model,) = ModelRegistry(tiny_store, [ModelSettings(id=EMBEDDER)]).open_models()
    return model


def monitor(*, running: int, running_later: int) -> ClusterMonitor:
    later = ClusterSnapshot({"CpuEncoder": running_later})
    monitor = ClusterMonitor({Device.CPU: EncoderSettings()}, lambda: later)
    monitor.apply(ClusterSnapshot({"CpuEncoder": running}))
    return monitor


async def test_cold_start_without_a_replica_raises_model_loading(model: RegisteredModel) -> None:
    cold = monitor(running=0, running_later=0)
    with pytest.raises(ModelLoading):
        async with limit_cold_start(cold, model, Device.CPU, WAIT_S):
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("running", "running_later", "wait_s"), [(0, 1, WAIT_S), (1, 0, WAIT_S), (0, 0, None)]
)
async def test_cold_start_continues_with_a_replica_or_without_a_limit(
    running: int, running_later: int, wait_s: float | None, model: RegisteredModel
) -> None:
    starting = monitor(running=running, running_later=running_later)
    async with limit_cold_start(starting, model, Device.CPU, wait_s):
        await asyncio.sleep(5 * WAIT_S)


@pytest.mark.parametrize(("running", "error"), [(0, ModelLoading), (1, DeadlineExceeded)])
async def test_cold_start_at_the_deadline_reports_a_loading_model(
    running: int, error: type[Exception], model: RegisteredModel
) -> None:
    with pytest.raises(error):
        async with limit_cold_start(
            monitor(running=0, running_later=running), model, Device.CPU, None
        ):
            raise DeadlineExceeded("too late")


async def test_late_requests_share_the_state_of_a_running_replica(model: RegisteredModel) -> None:
    reads = 0

    def read() -> ClusterSnapshot:
        nonlocal reads
        reads += 1
        return ClusterSnapshot({"CpuEncoder": 1})

    warm = ClusterMonitor({Device.CPU: EncoderSettings()}, read)
    await warm.refresh()
    for _ in range(10):
        with pytest.raises(DeadlineExceeded):
            async with limit_cold_start(warm, model, Device.CPU, WAIT_S):
                raise DeadlineExceeded("too late")
    assert reads == 1


async def test_cold_start_passes_other_timeouts_on(model: RegisteredModel) -> None:
    with pytest.raises(TimeoutError):
        async with limit_cold_start(monitor(running=0, running_later=0), model, Device.CPU, WAIT_S):
            raise TimeoutError


async def test_estimate_is_the_measured_start_of_the_deployment(model: RegisteredModel) -> None:
    cold = monitor(running=0, running_later=0)
    now_s = cold._applied_s
    cold._starts.note({"CpuEncoder": 1}, {}, now_s)
    cold._starts.note({}, {"CpuEncoder": 1}, now_s + 3.25)
    with pytest.raises(ModelLoading) as raised:
        async with limit_cold_start(cold, model, Device.CPU, WAIT_S):
            await asyncio.Event().wait()
    assert raised.value.estimated_time_s == raised.value.retry_after_s == 3.2
