from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from benchmarks.__main__ import main
from benchmarks.autoscaling.day import Day
from benchmarks.autoscaling.policies import read_autoscaling
from benchmarks.placement.simulation import (
    POLICIES,
    FleetSettings,
    PlacedDay,
    ReplayedDay,
    split_by_deadline,
)
from deployments.artifacts.types import Device
from deployments.deployment_names import ENCODER_DEPLOYMENTS

CONFIG = Path(__file__).parents[4] / "serve_config.yaml"
CPU, GPU = Device.CPU, Device.GPU
REQUEST_S = 0.02
BY_NAME = {policy.name: policy for policy in POLICIES}


@pytest.fixture(scope="module")
def autoscaling() -> Mapping[Device, Mapping[str, Any]]:
    return {device: read_autoscaling(CONFIG, name) for device, name in ENCODER_DEPLOYMENTS.items()}


def replay(
    name: str, work: list[float], autoscaling: Mapping[Device, Mapping[str, Any]], **settings: Any
) -> ReplayedDay:
    """Replay interactive requests of one model that need `work` CPU replicas in each second."""
    requests = np.array([[round(each / REQUEST_S) for each in work], [0] * len(work)])
    day = Day(np.full(2, REQUEST_S), requests)
    merged = FleetSettings(**{"gpu_speedups": (10.0,), **settings})
    return PlacedDay(day, merged, BY_NAME[name], autoscaling).run()


def test_split_by_deadline_keeps_every_request() -> None:
    day = Day(np.array([0.01, 0.1]), np.array([[5, 0, 9], [1, 2, 3]]))
    split = split_by_deadline(day, FleetSettings(), seed=1)
    assert split.requests.shape == (4, 3)
    assert (split.requests[:2] + split.requests[2:] == day.requests).all()
    assert split.request_s.tolist() == [0.01, 0.1, 0.01, 0.1]


def test_auto_leaves_a_light_load_on_the_cpu(autoscaling: Mapping[Device, Any]) -> None:
    outcome = replay("auto", [0.3] * 60, autoscaling)
    assert outcome.by_device == {CPU: outcome.requests, GPU: 0}
    assert outcome.replica_hours[GPU] == 0
    assert outcome.in_time == outcome.requests


def test_auto_prefers_a_running_gpu_that_is_cheaper_per_request(
    autoscaling: Mapping[Device, Any],
) -> None:
    cheap, dear = (
        replay("auto, one GPU kept", [0.3] * 60, autoscaling, gpu_price=price)
        for price in (2.0, 20.0)
    )
    assert cheap.by_device[GPU] == cheap.requests
    assert dear.by_device[GPU] == 0


def test_auto_wakes_the_gpu_for_a_burst_that_the_cpus_cannot_answer(
    autoscaling: Mapping[Device, Any],
) -> None:
    work = [0.3] * 30 + [6.0] * 120
    alone = replay("always CPU", work, autoscaling, cpu_replicas=2)
    auto = replay("auto", work, autoscaling, cpu_replicas=2)
    assert auto.replica_hours[GPU] > 0
    assert auto.in_time > 2 * alone.in_time


def test_every_request_is_placed(autoscaling: Mapping[Device, Any]) -> None:
    for name in BY_NAME:
        outcome = replay(name, [0.5, 3.0, 0.1] * 20, autoscaling)
        assert sum(outcome.by_device.values()) == outcome.requests


def test_command_writes_results_of_every_policy(tmp_path: Path) -> None:
    options = ["--hours", "1", "--config", str(CONFIG), "--out", str(tmp_path)]
    assert main(["placement", *options]) == 0
    (path,) = tmp_path.glob("*.json")
    (table,) = orjson.loads(path.read_bytes())["tables"]
    assert [row[0] for row in table["rows"]] == [policy.name for policy in POLICIES]


@pytest.mark.parametrize("speedups", [["8"], ["4", "12", "30", "60"]])
def test_every_model_needs_one_speedup(speedups: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["placement", "--gpu-speedups", *speedups])
