from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.host.gpus import MEBIBYTE, Gpu, find_visible, order_by_bus, read_gpus

H200 = Gpu(
    name="NVIDIA H200",
    driver="580.159.03",
    memory_bytes=143771 * MEBIBYTE,
    compute_capability=(9, 0),
    uuid="GPU-5a1b",
)
T4 = Gpu(name="Tesla T4", driver="580.159.03", compute_capability=(7, 5), uuid="GPU-7c2d")
P400 = Gpu(name="Quadro P400", driver="580.159.03", compute_capability=(6, 1), uuid="GPU-9e3f")


def test_gpus_are_read_from_nvidia_smi(fake_nvidia_smi: Callable[[str], None]) -> None:
    fake_nvidia_smi(
        "echo 'NVIDIA H200, 580.159.03, 143771, 9.0, GPU-5a1b'\n"
        "echo 'Tesla T4, 580.159.03, [N/A], 7.5, GPU-7c2d'"
    )
    assert read_gpus() == (H200, T4)


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
    device_file = tmp_path / "nvidiactl"
    assert read_gpus(tmp_path, device_file) == (), "a container without the GPUs of its host"
    device_file.touch()
    assert read_gpus(tmp_path, device_file) == (Gpu(name="NVIDIA H200", driver="580.159.03"),)
    assert read_gpus(tmp_path / "missing", device_file) == ()


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
    ("visible", "expected"),
    [
        (None, (H200, T4)),
        ("", ()),
        ("-1", ()),
        ("1", (T4,)),
        ("1,0", (T4, H200)),
        ("0, 1", (H200, T4)),
        ("0,1,2", (H200, T4)),
        ("GPU-7c2d,GPU-5a", (T4, H200)),
        # CUDA ignores what follows an invalid entry.
        ("0,-1,1", (H200,)),
        ("2,0", ()),
        ("0,,1", (H200,)),
        ("none", ()),
        ("GPU-5a1b,GPU-0000,GPU-7c2d", (H200,)),
    ],
)
def test_visible_gpus_are_those_that_cuda_shows(
    visible: str | None, expected: tuple[Gpu, ...]
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert find_visible((H200, T4), environment) == expected


def test_instance_of_a_gpu_counts_as_a_gpu_that_runs_cuda() -> None:
    """nvidia-smi does not tell which GPU has the instance."""
    instances = {"CUDA_VISIBLE_DEVICES": "MIG-7c2d,MIG-8d3e,MIG-9f4a"}
    assert find_visible((P400, H200), instances) == (H200, H200)
    assert find_visible((P400,), instances) == (P400,)
    assert find_visible((), instances) == ()


def test_cuda_orders_gpus_as_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    order_by_bus()
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    order_by_bus()
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
