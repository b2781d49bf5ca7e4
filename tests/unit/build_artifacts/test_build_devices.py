"""Devices that a build can use, on a host with faked GPUs and ONNX Runtime providers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnxruntime
import pytest

from build_artifacts import build_devices
from build_artifacts.build_devices import engine_settings, fit_to_host, has_device
from build_artifacts.presets import DYNAMIC, FULL, QUICK
from deployments.artifacts.types import Device
from deployments.host.gpus import Gpu

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
H200 = Gpu(name="NVIDIA H200", driver="580.159.03")


@pytest.fixture
def fake_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that fakes the GPUs of this host and the providers of ONNX Runtime."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def fake(*gpus: Gpu, providers: tuple[str, ...] = (CUDA, CPU)) -> None:
        monkeypatch.setattr(build_devices, "read_gpus", lambda: gpus)
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: list(providers))
        has_device.cache_clear()

    yield fake
    has_device.cache_clear()


def test_cuda_packages_without_a_gpu_are_no_gpu(fake_host: Callable[..., None]) -> None:
    fake_host()
    assert not has_device(Device.GPU)
    assert has_device(Device.CPU)
    assert engine_settings(Device.GPU, 2).providers == (CPU,)


def test_gpu_without_cuda_packages_cannot_be_measured(fake_host: Callable[..., None]) -> None:
    fake_host(H200, providers=(CPU,))
    assert not has_device(Device.GPU)


def test_gpu_with_cuda_packages_is_measured_on_cuda(fake_host: Callable[..., None]) -> None:
    fake_host(H200)
    assert has_device(Device.GPU)
    assert engine_settings(Device.GPU, 2).providers == (CUDA,)
    assert engine_settings(Device.CPU, 2).providers == (CPU,)


def test_gpu_with_an_old_driver_is_no_gpu(fake_host: Callable[..., None]) -> None:
    fake_host(Gpu(name="A10", driver="550.90.07"))
    assert not has_device(Device.GPU)


def test_hidden_gpu_is_no_gpu(
    fake_host: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_host(H200)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not has_device(Device.GPU)


def test_first_visible_gpu_decides(
    fake_host: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    display = Gpu(name="Quadro P400", driver="580.159.03", compute_capability=(6, 1))
    fake_host(display, H200)
    assert not has_device(Device.GPU), "engines would run on the first"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    fake_host(display, H200)
    assert has_device(Device.GPU)


def test_only_gpu_graph_gets_cuda_graphs_where_a_gpu_runs_them(
    fake_host: Callable[..., None],
) -> None:
    fake_host()
    assert fit_to_host(QUICK) is QUICK
    fake_host(H200)
    fitted = fit_to_host(QUICK)
    assert [recipe.name for recipe in fitted.candidates] == [
        "cpu-int8",
        "cpu-int8-weights",
        "gpu-fp16-bound",
    ]
    assert fitted.decoders == QUICK.decoders
    assert fit_to_host(DYNAMIC).candidates_for(Device.GPU) == fitted.candidates_for(Device.GPU)
    assert fit_to_host(FULL) is FULL, "it measures all GPU graphs"
