"""Tests of the GPU memory budget that replicas in several processes share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.artifacts.types import Device
from deployments.errors import BadSetting
from deployments.host.gpus import MEBIBYTE, VisibleGpu
from deployments.replicas import device_memory
from deployments.replicas.device_memory import DeviceMemory, count_budget, open_device_memory

SMI = "echo '0, GPU-a, 1000'; echo '1, GPU-b, 2000'"
OTHER_REPLICA = """\
import sys
from pathlib import Path
from deployments.replicas.device_memory import DeviceMemory
memory = DeviceMemory(Path(sys.argv[1]), 100)
print(memory.claim(60), flush=True)
sys.stdin.read()
"""


def test_replicas_share_one_budget(tmp_path: Path) -> None:
    encoder, generator = (DeviceMemory(tmp_path / "gpu", 100) for _ in range(2))
    assert encoder.claim(30)
    assert generator.claim(60)
    assert not encoder.claim(11)
    assert encoder.count_free() == generator.count_free() == 10
    generator.release(60)
    assert encoder.claim(70)
    encoder.close()
    assert generator.count_free() == 100
    encoder.release(100)  # ignored: a load may end after its replica is closed
    generator.close()


def test_claim_of_a_killed_replica_does_not_count(tmp_path: Path) -> None:
    memory = DeviceMemory(tmp_path / "gpu", 100)
    command = [sys.executable, "-c", OTHER_REPLICA, str(tmp_path / "gpu")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert memory.count_free() == 40
        other.kill()
        other.wait()
        assert memory.claim(100)
    assert len(list((tmp_path / "gpu").glob("*.claim"))) == 1
    memory.close()


def test_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = tmp_path.lstat().st_uid
    monkeypatch.setattr(device_memory.os, "getuid", lambda: owner + 1)
    with pytest.raises(BadSetting, match="belongs to another user"):
        DeviceMemory(tmp_path / "gpu", 100)


@pytest.mark.parametrize(
    ("budget", "memories", "expected"),
    [
        (0.5, [1000], 500),
        (1, [1000, 2000], 3000),
        (5e9, [], 5_000_000_000),
        (5e9, [9, 9], 10_000_000_000),
        (0.5, [], None),
    ],
)
def test_budget_is_a_fraction_or_bytes(
    budget: float, memories: list[int], expected: int | None
) -> None:
    gpus = [VisibleGpu(f"GPU-{number}", size) for number, size in enumerate(memories)]
    assert count_budget(budget, gpus) == expected


@pytest.mark.parametrize(
    ("visible", "mebibytes"), [("0", 500), ("GPU-b", 1000), ("1,0", 1500), (None, 1500)]
)
def test_budget_is_that_of_the_assigned_gpus(
    tmp_path: Path,
    fake_nvidia_smi: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    mebibytes: int,
) -> None:
    fake_nvidia_smi(SMI)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    memory = open_device_memory(0.5, Device.GPU, tmp_path)
    assert memory is not None
    assert memory.limit == mebibytes * MEBIBYTE
    memory.close()


def test_replica_with_eight_gpus_has_a_budget(
    tmp_path: Path, fake_nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their UUIDs together are longer than a file name may be."""
    uuids = [f"GPU-0000000{number}-1111-2222-3333-444444444444" for number in range(8)]
    fake_nvidia_smi("\n".join(f"echo {n}, {uuid}, 1000" for n, uuid in enumerate(uuids)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    memory, same = (open_device_memory(0.5, Device.GPU, tmp_path) for _ in range(2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    other = open_device_memory(0.5, Device.GPU, tmp_path)
    assert memory is not None
    assert same is not None
    assert other is not None
    assert memory.claim(4000 * MEBIBYTE)
    assert (same.count_free(), other.count_free()) == (0, 3500 * MEBIBYTE)
    for each in (memory, same, other):
        each.close()


def test_unknown_gpu_has_no_fraction(
    tmp_path: Path,
    fake_nvidia_smi: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake_nvidia_smi(SMI)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c")
    assert open_device_memory(0.5, Device.GPU, tmp_path) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "Set `gpu_memory` in bytes" in record.message
    in_bytes = open_device_memory(1 << 30, Device.GPU, tmp_path)
    assert in_bytes is not None
    assert in_bytes.limit == 1 << 30
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-d")
    of_other_instance = open_device_memory(1 << 30, Device.GPU, tmp_path)
    assert of_other_instance is not None
    assert in_bytes.claim(1 << 30)
    assert of_other_instance.claim(1 << 30)
    in_bytes.close()
    of_other_instance.close()
    assert open_device_memory(1 << 30, Device.CPU, tmp_path) is None
