"""The GPUs of this host that an installed engine can use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.installation import REPAIR, why_no_gpu
from deployments.gpus import (
    MIN_COMPUTE_CAPABILITY,
    MIN_DRIVER_SERIES,
    VISIBLE_GPUS_VARIABLE,
    Gpu,
    count_visible,
    read_gpus,
)
from deployments.machine import installed_versions

# Each encoder replica on a GPU starts ONNX Runtime's provider for CUDA, and builds measure with it.
# Therefore no GPU is usable without this package, even if torch can use it.
_ENGINE = "onnxruntime-gpu"
_PACKAGES = ("onnxruntime", _ENGINE, "torch", "transformers")
_GIBIBYTE = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuSupport:
    """The GPUs of a host, and the installed engines that can use them."""

    gpus: tuple[Gpu, ...]
    visible: int  # number of GPUs that CUDA shows to this process
    engines: tuple[str, ...]  # names of installed engine packages that are built for CUDA
    problem: str | None  # why no engine here can use the GPUs; None if one can
    # What to do about `problem`. Empty without a problem, or if GPU and _ENGINE are both missing.
    repair: str

    @property
    def usable(self) -> int:
        """Number of GPUs to report to Ray."""
        return 0 if self.problem else self.visible

    def describe(self) -> str:
        if not self.gpus:
            return f"no GPU, although `{_ENGINE}` is installed" if self.repair else "no GPU"
        first = self.gpus[0]
        count = f"{len(self.gpus)} x " if len(self.gpus) > 1 else ""
        facts = [f"{count}{first.name}"]
        if first.memory_bytes:
            facts.append(f"{first.memory_bytes / _GIBIBYTE:.0f} GiB")
        if first.capability_text:
            facts.append(f"compute capability {first.capability_text}")
        facts.append(f"driver {first.driver or 'unknown'}")
        use = f"not used, {self.problem}" if self.problem else f"for {' and '.join(self.engines)}"
        return f"{', '.join(facts)}: {use}"


def read_gpu_support() -> GpuSupport:
    gpus = read_gpus()
    return assess_gpus(gpus, installed_versions(_PACKAGES), count_visible(len(gpus)))


def assess_gpus(gpus: Sequence[Gpu], versions: Mapping[str, str], visible: int) -> GpuSupport:
    """Find the installed engines that run on `gpus`. CUDA shows `visible` of these GPUs."""
    engines = [_ENGINE] if _ENGINE in versions else []
    # The version of a CPU build of torch ends with `+cpu`, such as 2.13.0+cpu.
    if "+cpu" not in versions.get("torch", "+cpu") and "transformers" in versions:
        engines.append("torch")
    problem, repair = why_no_gpu(gpus), ""
    if problem is not None:
        repair = _repair_host(gpus, visible) if gpus or _ENGINE in versions else ""
    elif _ENGINE not in versions:
        problem, repair = f"`{_ENGINE}` is not installed", REPAIR
    elif "onnxruntime" in versions:
        problem = f"`onnxruntime` and `{_ENGINE}` are both installed and own one import name"
        repair = REPAIR
    return GpuSupport(tuple(gpus), visible, tuple(engines), problem, repair)


def _repair_host(gpus: Sequence[Gpu], visible: int) -> str:
    if not gpus:
        return (
            "run `nvidia-smi` as the user of the server; if only root sees the GPU, enable "
            "`nvidia-persistenced`, which creates the device files at boot"
        )
    if not visible:
        return f"unset `{VISIBLE_GPUS_VARIABLE}`"
    if gpus[0].has_old_driver:
        return f"install driver {MIN_DRIVER_SERIES} or later, then {REPAIR}"
    major, minor = MIN_COMPUTE_CAPABILITY
    return f"use a GPU of compute capability {major}.{minor} or later"


def gpu_environment(requested: int | None) -> dict[str, str]:
    """Return the variable that hides the GPUs of this host if `requested` is 0.

    Ray gives no GPU to actors with `num_gpus: 0`, but does not hide the GPUs from them. The process
    in which the ingress builds models, for example, would use the GPUs.
    """
    return {VISIBLE_GPUS_VARIABLE: ""} if requested == 0 else {}
