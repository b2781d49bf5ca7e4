from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.ingress.devices.cluster_state import (
    MAX_AGE_S,
    ClusterMonitor,
    ClusterSnapshot,
    DeploymentState,
    ReplicaTarget,
    read_serve_status,
)
from tests.support.fakes import TIMEOUT_S, FakeClock, wait_until

ALL = {"Tokenizer": 1, "CpuEncoder": 2, "GpuEncoder": 0}


class FakeLook:
    """A status read that returns `views` in turn, then the last one again. It raises for None."""

    def __init__(self, *views: ClusterSnapshot | None) -> None:
        self.views = list(views)
        self.looks = 0

    def __call__(self) -> ClusterSnapshot:
        self.looks += 1
        view = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        if view is None:
            raise ConnectionError("the controller does not answer")
        return view


def monitor(look: FakeLook, *, gpu: str = "auto") -> ClusterMonitor:
    return ClusterMonitor(
        {Device.CPU: EncoderSettings(), Device.GPU: EncoderSettings(available=gpu)}, look
    )


@pytest.mark.parametrize(
    ("setting", "gpus", "available"),
    [("auto", 0.0, False), ("auto", 1.0, True), ("always", 0.0, True), ("always", 4.0, True)],
)
async def test_gpu_encoder_is_available_with_gpus_or_autoscaling(
    setting: str, gpus: float, available: bool
) -> None:
    encoders = monitor(FakeLook(ClusterSnapshot(ALL, gpus)), gpu=setting)
    await encoders.refresh()
    assert encoders.encoder_states[Device.GPU] == DeploymentState(available=available, running=0)
    assert encoders.encoder_states[Device.CPU] == DeploymentState(available=True, running=2)


async def test_failing_gpu_encoder_is_not_available() -> None:
    failing = frozenset(ALL)
    encoders = monitor(FakeLook(ClusterSnapshot(ALL, gpus=1.0, failing=failing)))
    await encoders.refresh()
    assert not encoders.encoder_states[Device.GPU].available
    assert encoders.encoder_states[Device.CPU].available


async def test_concurrent_refreshes_share_one_read() -> None:
    look = FakeLook(ClusterSnapshot(ALL))
    encoders = monitor(look)
    await asyncio.gather(*(encoders.refresh() for _ in range(20)))
    assert look.looks == 1
    await encoders.refresh()
    assert look.looks == 2


async def test_cpu_encoder_is_available_without_gpus() -> None:
    encoders = ClusterMonitor(
        {Device.CPU: EncoderSettings(available="auto")}, FakeLook(ClusterSnapshot())
    )
    await encoders.refresh()
    assert encoders.encoder_states == {Device.CPU: DeploymentState(available=True, running=0)}


def test_state_is_empty_before_the_first_read() -> None:
    encoders = monitor(FakeLook(ClusterSnapshot(ALL)))
    assert encoders.encoder_states[Device.CPU].running == 0
    assert encoders.missing() == ["no tokenizer is running", "no cpu encoder is running"]


@pytest.mark.parametrize(
    ("running", "missing"),
    [
        (ALL, []),
        ({"CpuEncoder": 1}, ["no tokenizer is running"]),
        ({"Tokenizer": 1, "CpuEncoder": 0, "GpuEncoder": 1}, ["no cpu encoder is running"]),
    ],
)
async def test_missing_lists_required_deployments_only(
    running: dict[str, int], missing: list[str]
) -> None:
    encoders = monitor(FakeLook(ClusterSnapshot(running)))
    await encoders.refresh()
    assert encoders.missing() == missing


@pytest.mark.parametrize("device", [Device.GPU, None])
async def test_server_without_a_cpu_encoder_does_not_wait_for_one(device: Device | None) -> None:
    encoders = {} if device is None else {device: EncoderSettings()}
    servers = ClusterMonitor(encoders, FakeLook(ClusterSnapshot({"Tokenizer": 1}, gpus=1.0)))
    await servers.refresh()
    assert servers.missing() == []


async def test_failed_read_keeps_the_former_state() -> None:
    encoders = monitor(FakeLook(ClusterSnapshot(ALL, 1.0), None))
    await encoders.refresh()
    former = encoders.encoder_states
    await encoders.refresh()
    assert encoders.encoder_states == former
    assert encoders.missing() == []


@pytest.mark.parametrize("status", ["DEPLOYING", "DEPLOY_FAILED"])
async def test_import_of_the_application_keeps_the_former_state(
    status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Serve imports a deployed application, it lists no deployments. The old ones serve."""
    clock = FakeClock()
    monkeypatch.setattr("deployments.ingress.devices.cluster_state.time.monotonic", clock)
    running = {
        "status": "HEALTHY",
        "replicas": [{"state": "RUNNING"}, {"state": "RUNNING"}],
        "target_num_replicas": 2,
        "deployment_config": {},
    }
    names = ("Ingress", "Tokenizer", "CpuEncoder")
    apps = iter(
        [
            {"status": status, "deployments": {}},
            {"status": "RUNNING", "deployments": dict.fromkeys(names, running)},
            {"status": status, "deployments": {}},
        ]
    )
    client = SimpleNamespace(get_serve_details=lambda: {"applications": {"app": next(apps)}})
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda: client)
    monkeypatch.setattr("ray.cluster_resources", dict)
    servers = ClusterMonitor({Device.CPU: EncoderSettings()}, lambda: read_serve_status("app"))
    await servers.refresh()
    assert servers.missing() == ["no tokenizer is running", "no cpu encoder is running"]
    await servers.refresh()
    assert servers.missing() == []
    clock.now_s += MAX_AGE_S + 1
    await servers.refresh()
    assert servers.missing() == []
    assert servers.count_ingress_replicas() == 2
    assert servers.encoder_states[Device.CPU].running == 2


async def test_state_that_is_too_old_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr("deployments.ingress.devices.cluster_state.time.monotonic", clock)
    encoders = monitor(FakeLook(ClusterSnapshot(ALL), None, ClusterSnapshot(ALL)))
    await encoders.refresh()
    clock.now_s += MAX_AGE_S
    await encoders.refresh()  # fails
    assert encoders.missing() == []
    clock.now_s += 1
    (missing,) = encoders.missing()
    assert "is 31 s old, the maximum is 30 s" in missing
    await encoders.refresh()
    assert encoders.missing() == []


async def test_refreshing_ends_at_the_end_of_the_block() -> None:
    encoders = monitor(FakeLook(ClusterSnapshot({}), ClusterSnapshot(ALL)))
    before = asyncio.all_tasks()
    async with encoders.refreshing():
        assert encoders.missing(), "the first look is done"
        await wait_until(lambda: not encoders.missing())  # takes about REFRESH_STARTING_S
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before, "no task reads the status any more"


async def test_hanging_controller_does_not_block_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.devices.cluster_state.STATUS_TIMEOUT_S", 0.01)
    held = threading.Event()

    def look() -> ClusterSnapshot:
        held.wait(TIMEOUT_S)
        return ClusterSnapshot({"CpuEncoder": 1})

    monitor = ClusterMonitor({Device.CPU: EncoderSettings()}, look)
    await monitor.refresh_with_timeout()
    assert monitor.encoder_states[Device.CPU].running == 0
    held.set()
    await monitor.refresh()
    assert monitor.encoder_states[Device.CPU].running == 1


def test_replicas_that_take_a_config_or_are_found_again_count_as_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = ("RUNNING", "UPDATING", "RECOVERING", "STARTING", "STOPPING")
    scaled = {
        "status": "UPDATING",
        "replicas": [{"state": state} for state in states],
        "target_num_replicas": 4,
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 8}},
    }
    fixed = {
        "status": "UNHEALTHY",
        "replicas": [],
        "target_num_replicas": 1,
        "deployment_config": {},
    }
    app = {"deployments": {"CpuEncoder": scaled, "Tokenizer": fixed}}
    details = {"applications": {"hundredfold": app}}
    client = SimpleNamespace(get_serve_details=lambda: details)
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda: client)
    monkeypatch.setattr("ray.cluster_resources", dict)
    assert read_serve_status("hundredfold") == ClusterSnapshot(
        {"CpuEncoder": 3, "Tokenizer": 0},
        failing=frozenset({"Tokenizer"}),
        starting={"CpuEncoder": 1},
        targets={"CpuEncoder": ReplicaTarget(4, 1, 8), "Tokenizer": ReplicaTarget(1, 1, 1)},
    )
    assert read_serve_status("another") == ClusterSnapshot()


def test_document_of_serve_has_what_is_read() -> None:
    """`read_serve_status` reads these fields through a private client of Ray Serve."""
    from ray.serve.config import AutoscalingConfig
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ApplicationDetails, DeploymentDetails, ReplicaDetails

    assert callable(_get_global_client)
    assert "deployments" in ApplicationDetails.model_fields
    assert "state" in ReplicaDetails.model_fields
    read = {"status", "replicas", "target_num_replicas", "deployment_config"}
    assert read <= set(DeploymentDetails.model_fields)
    defaults = AutoscalingConfig()
    assert (defaults.min_replicas, defaults.max_replicas) == (1, 1)
