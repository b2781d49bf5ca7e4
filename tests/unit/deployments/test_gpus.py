from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.gpus import MEBIBYTE, Gpu, count_visible, read_gpus

H200 = Gpu(
    name="NVIDIA H200",
    driver="580.159.03",
    memory_bytes=143771 * MEBIBYTE,
    compute_capability=(9, 0),
)


def test_gpus_are_read_from_nvidia_smi(fake_nvidia_smi: Callable[[str], None]) -> None:
    fake_nvidia_smi(
        "echo 'NVIDIA H200, 580.159.03, 143771, 9.0'; echo 'Tesla T4, 580.159.03, [N/A], 7.5'"
    )
    first, second = read_gpus()
    assert first == H200
    assert (second.name, second.memory_bytes, second.compute_capability) == ("Tesla T4", 0, (7, 5))


def test_old_driver_without_a_field_leaves_it_unknown(
    fake_nvidia_smi: Callable[[str], None],
) -> None:
    fake_nvidia_smi("echo 'Tesla V100, 470.82.01, 16160, [N/A]'")
    (gpu,) = read_gpus()
    assert gpu.compute_capability == (0, 0)


def test_gpus_are_read_from_the_driver_without_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    card = tmp_path / "gpus" / "0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 7\n")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\n"
    )
    assert read_gpus(tmp_path) == (Gpu(name="NVIDIA H200", driver="580.159.03"),)
    assert read_gpus(tmp_path / "missing") == ()


@pytest.mark.parametrize(
    ("gpu", "problem"),
    [
        (H200, None),
        (Gpu(name="unknown", driver=""), None),
        (Gpu(name="A10", driver="570.86.15", compute_capability=(8, 6)), "too old for CUDA 13"),
        (Gpu(name="V100", driver="580.65.06", compute_capability=(7, 0)), "compute capability 7.0"),
    ],
)
def test_driver_and_capability_decide_whether_cuda_runs(gpu: Gpu, problem: str | None) -> None:
    assert (gpu.problem is None) if problem is None else (problem in str(gpu.problem))


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("", 0),
        ("-1", 0),
        ("1", 1),
        ("0,1", 2),
        ("0, 1", 2),
        ("0,1,2", 2),
        ("GPU-5a1b,MIG-7c2d", 2),
        # CUDA ignores what follows an invalid entry.
        ("0,-1,1", 1),
        ("2,0", 0),
        ("0,,1", 1),
        ("none", 0),
    ],
)
def test_hidden_gpus_do_not_count(visible: str | None, count: int) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_visible(2, environment) == count
