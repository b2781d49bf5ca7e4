"""Measurements of the device: matrix rate, bandwidth, used memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from statistics import mean, pstdev
from typing import Any

import psutil

from benchmarks.gpu.cases import Bench, Case, Target
from deployments.host.gpus import Gpu, read_gpus

_WARM_UPS = 3
_MAX_CALLS = 200


def time_calls(call: Callable[[], object], target: Target, *, seconds: float) -> list[float]:
    """Time at least three calls after a warm-up. Return the seconds of each call.

    The time of a call ends when the device has computed everything.
    """
    for _ in range(_WARM_UPS):
        call()
    target.synchronize()
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end_s and len(times) < _MAX_CALLS):
        started_s = time.perf_counter()
        call()
        target.synchronize()
        times.append(time.perf_counter() - started_s)
    return times


def summarize_ms(times_s: list[float]) -> dict[str, float]:
    """Return mean, standard deviation and minimum of the times in milliseconds."""
    return {
        "mean_ms": mean(times_s) * 1e3,
        "deviation_ms": pstdev(times_s) * 1e3,
        "best_ms": min(times_s) * 1e3,
    }


def used_bytes(target: Target) -> int:
    """Return the used bytes of the device, or the resident bytes of this process in a dry run."""
    if target.is_cuda:
        import torch

        free, total = torch.cuda.mem_get_info()
        return int(total - free)
    return int(psutil.Process().memory_info().rss)


def release_memory(target: Target) -> None:
    """Free the memory that torch caches, so that it is available to the next case."""
    gc.collect()
    if target.is_cuda:
        import torch

        torch.cuda.empty_cache()


def matrix_rate(target: Target) -> float:
    """Return FLOP/s of FP16 products of large square matrices: the card's practical limit."""
    import torch

    size = target.choose(8_192, 128)
    left, right = (
        torch.randn(size, size, dtype=torch.float16, device=target.device) for _ in range(2)
    )
    times = time_calls(lambda: left @ right, target, seconds=target.choose(1.5, 0.05))
    return float(2 * size**3 / min(times))


def _measure_matrix_rate(bench: Bench) -> Mapping[str, Any]:
    return {"tflops": matrix_rate(bench.target) / 1e12}


def _measure_bandwidth(bench: Bench) -> Mapping[str, Any]:
    import torch

    target = bench.target
    source = torch.empty(target.choose(4 << 30, 1 << 20), dtype=torch.uint8, device=target.device)
    copy = torch.empty_like(source)
    times = time_calls(lambda: copy.copy_(source), target, seconds=target.choose(1.0, 0.02))
    values = {"read_and_write_bytes_per_s": 2 * source.numel() / min(times)}
    host = torch.empty(target.choose(256 << 20, 1 << 20), dtype=torch.uint8)
    if target.is_cuda:
        host = host.pin_memory()
    times = time_calls(
        lambda: copy[: host.numel()].copy_(host), target, seconds=target.choose(1.0, 0.02)
    )
    return {**values, "host_to_device_bytes_per_s": host.numel() / min(times)}


def _describe(bench: Bench) -> Mapping[str, Any]:
    import torch

    values: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "gpus": describe_gpus(read_gpus()),
    }
    try:
        import onnxruntime

        values["onnxruntime_providers"] = onnxruntime.get_available_providers()
    except ModuleNotFoundError:
        values["onnxruntime_providers"] = []
    if bench.target.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        values["device"] = properties.name
        values["device_bytes"] = properties.total_memory
        values["multiprocessors"] = properties.multi_processor_count
        # `gpus` lacks this value where nvidia-smi is missing.
        values["compute_capability"] = f"{properties.major}.{properties.minor}"
    return values


def describe_gpus(gpus: Iterable[Gpu]) -> list[dict[str, Any]]:
    return [
        {
            "name": gpu.name,
            "driver": gpu.driver,
            "memory_bytes": gpu.memory_bytes,
            "compute_capability": gpu.capability_text,
        }
        for gpu in gpus
    ]


def device_cases(_target: Target) -> list[Case]:
    return [
        Case("description", _describe),
        Case("matrix-rate", _measure_matrix_rate),
        Case("bandwidth", _measure_bandwidth),
    ]
