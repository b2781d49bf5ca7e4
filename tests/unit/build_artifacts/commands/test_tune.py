"""`hundredfold models tune`: the device and the threads that it measures, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts import build_devices
from build_artifacts.__main__ import main
from build_artifacts.commands import tune as tune_command
from deployments.artifacts.types import Device
from deployments.tuning import tuner
from deployments.tuning.costs import CostTable, TuningTarget, read_costs
from tests.support.tuning_artifacts import seal_tunable, write_table

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[TuningTarget]:
    """Seal a model in `tmp_path` and replace the measurement. Return the list of its targets."""
    tuned = seal_tunable(tmp_path)
    write_table(tuned, {"1x16": "plain"})
    targets: list[TuningTarget] = []

    def tune_exclusively(target: TuningTarget, *_: object, **__: object) -> CostTable:
        targets.append(target)
        table = read_costs(tuned)
        assert table is not None
        return table

    monkeypatch.setattr(tuner, "tune_exclusively", tune_exclusively)
    monkeypatch.setattr(tune_command, "usable_cores", lambda: 4)
    return targets


def tune(store: Path, *arguments: str) -> int:
    return main(["tune", "tiny/embedder", "--store", str(store), *arguments])


def fake_gpu(monkeypatch: pytest.MonkeyPatch, *, is_here: bool) -> None:
    monkeypatch.setattr(build_devices, "has_device", lambda device: is_here or device is Device.CPU)


def test_gpu_is_measured_on_cuda_with_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[TuningTarget]
) -> None:
    fake_gpu(monkeypatch, is_here=True)
    assert tune(tmp_path, "--device", "gpu") == 0
    (target,) = measured
    assert (target.device, target.settings.providers) == (Device.GPU, (CUDA,))
    assert target.settings.intra_op_threads == 1


def test_cpu_is_measured_with_one_thread_and_with_all_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[TuningTarget]
) -> None:
    fake_gpu(monkeypatch, is_here=True)
    assert tune(tmp_path) == 0
    assert [target.settings.providers for target in measured] == [(CPU,)] * 2
    assert [target.settings.intra_op_threads for target in measured] == [1, 4]


def test_host_without_gpu_measures_nothing_for_a_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measured: list[TuningTarget],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_gpu(monkeypatch, is_here=False)
    assert tune(tmp_path, "--device", "gpu") == 1
    assert measured == []
    assert "this host has none" in capsys.readouterr().err


def test_costs_list_rejected_and_unmeasured_candidates(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain", "far", "astray"])
    reasons = {"rejected": {"astray": "mean cosine 0.1 < 0.985"}, "unmeasured": {"far": "no GPU"}}
    write_table(target, {"1x16": "plain"}, **reasons)
    table = read_costs(target)
    assert table is not None
    assert tune_command.format_costs(table).splitlines()[-2:] == [
        "astray violates the gate here: mean cosine 0.1 < 0.985",
        "far was not measured here: no GPU",
    ]
