from __future__ import annotations

import pytest

from deployments.artifacts.types import Device
from deployments.errors import HardwareUnavailable
from deployments.ingress.devices.cluster_state import DeploymentState
from deployments.ingress.devices.device_choice import prefer_device
from tests.support.artifacts import tiny_manifest

CPU, GPU = Device.CPU, Device.GPU
RUNS, SLEEPS, ABSENT = (
    DeploymentState(available=True, running=1),
    DeploymentState(available=True, running=0),
    DeploymentState(available=False, running=0),
)


@pytest.mark.parametrize(
    ("device", "graphs", "states", "expected"),
    [
        (CPU, (CPU, GPU), {CPU: RUNS, GPU: RUNS}, (CPU, None)),
        (GPU, (CPU, GPU), {CPU: RUNS, GPU: RUNS}, (GPU, None)),
        (GPU, (CPU, GPU), {CPU: RUNS, GPU: SLEEPS}, (GPU, None)),  # starts a GPU replica
        (CPU, (CPU, GPU), {CPU: SLEEPS, GPU: RUNS}, (CPU, None)),
        (GPU, (CPU, GPU), {CPU: RUNS, GPU: ABSENT}, (CPU, CPU)),
        (GPU, (CPU, GPU), {CPU: RUNS}, (CPU, CPU)),
        (GPU, (CPU,), {CPU: RUNS, GPU: RUNS}, (CPU, CPU)),
    ],
)
def test_preferred_device_is_chosen_if_it_can_run_the_model_else_the_cpu(
    device: Device,
    graphs: tuple[Device, ...],
    states: dict[Device, DeploymentState],
    expected: tuple[Device, Device | None],
) -> None:
    assert prefer_device(device, tiny_manifest(devices=graphs), states) == expected


@pytest.mark.parametrize(
    ("is_required", "graphs", "states", "device"),
    [
        (True, (CPU, GPU), {CPU: RUNS, GPU: ABSENT}, GPU),
        (True, (CPU, GPU), {CPU: RUNS}, GPU),
        (True, (CPU,), {CPU: RUNS, GPU: RUNS}, GPU),
        (False, (GPU,), {CPU: RUNS}, GPU),
        (False, (GPU,), {CPU: RUNS, GPU: RUNS}, CPU),
    ],
)
def test_choice_without_a_usable_device_raises(
    is_required: bool,
    graphs: tuple[Device, ...],
    states: dict[Device, DeploymentState],
    device: Device,
) -> None:
    manifest = tiny_manifest(devices=graphs)
    with pytest.raises(HardwareUnavailable) as error:
        prefer_device(device, manifest, states, is_required=is_required)
    assert device in error.value.message


def test_missing_gpu_graph_names_the_remedy() -> None:
    with pytest.raises(HardwareUnavailable, match="Build it again with `--force` on a host with"):
        prefer_device(GPU, tiny_manifest(devices=(CPU,)), {CPU: RUNS, GPU: RUNS}, is_required=True)
