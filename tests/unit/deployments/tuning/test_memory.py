from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.artifacts.types import Device
from deployments.tuning.host import count_fitting, free_bytes

MB = 1_000_000


@pytest.fixture
def graphs(tmp_path: Path) -> list[Path]:
    """Write three graphs of 1, 2 and 1 MB; half of the second is in an external data file."""
    for name, size in {"a.onnx": 1, "b.onnx": 1, "b.onnx.data": 1, "c.onnx": 1}.items():
        (tmp_path / name).write_bytes(b"\0" * size * MB)
    return [tmp_path / name for name in ("a.onnx", "b.onnx", "c.onnx")]


@pytest.mark.parametrize(
    ("room_mb", "fitting"), [(0, 0), (5.9, 0), (6, 1), (17.9, 1), (18, 2), (24, 3), (1_000, 3)]
)
def test_graphs_fit_until_three_times_their_files_exceed_half_of_the_memory(
    graphs: list[Path], room_mb: float, fitting: int
) -> None:
    assert count_fitting(graphs, int(room_mb * MB)) == fitting


def test_available_memory_of_this_host_is_positive() -> None:
    assert free_bytes(Device.CPU) > 10 * MB


def test_gpu_memory_limits_available_memory(
    fake_nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_nvidia_smi("echo '0, GPU-a, 3'; echo '1, GPU-b, 4'")
    assert free_bytes(Device.GPU) == 3 << 20
    assert free_bytes(Device.CPU) > 10 * MB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert free_bytes(Device.GPU) == 4 << 20
    fake_nvidia_smi("echo '1, GPU-b, [N/A]'")
    assert free_bytes(Device.GPU) > 10 * MB
