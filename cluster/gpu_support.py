"""The GPUs of this host that an installed engine can use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from cluster.installation import REPAIR, why_no_gpu
from deployments.host.gpus import (
    MIN_COMPUTE_CAPABILITY,
    MIN_DRIVER_SERIES,
    VISIBLE_GPUS_VARIABLE,
    Gpu,
    find_visible,
    read_gpus,
)
from deployments.host.machine import installed_versions

# Each encoder replica on a GPU starts ONNX Runtime's provider for CUDA, and builds measure with it.
# Therefore no GPU is usable without this package, even if torch can use it.
_ENGINE = "onnxruntime-gpu"
_PACKAGES = ("onnxruntime", _ENGINE, "torch", "transformers")
_GIBIBYTE = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuSupport:
    """The GPUs of a host, and the installed engines that can use them."""

    gpus: tuple[Gpu, ...]
    visible: tuple[Gpu, ...]  # those that CUDA shows to this process, in the order of CUDA
    engines: tuple[str, ...]  # names of installed engine packages that are built for CUDA
    problem: str | None  # why no engine here can use the GPUs; None if one can
    # What to do about `problem`, or about visible GPUs that no engine can use. Empty without these,
    # or if GPU and _ENGINE are both missing.
    repair: str

    @property
    def usable(self) -> int:
        """Number of GPUs to report to Ray, which places replicas on the first ones."""
        fit = takewhile(lambda gpu: gpu.problem is None, self.visible)
        return 0 if self.problem else len(tuple(fit))

    def describe(self) -> str:
        if not self.gpus:
            return f"no GPU, although `{_ENGINE}` is installed" if self.repair else "no GPU"
        kinds = Counter(map(_describe_kind, self.visible or self.gpus))
        counted = (f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items())
        use = f"not used, {self.problem}" if self.problem else f"for {' and '.join(self.engines)}"
        return f"{' and '.join(counted)}, driver {self.gpus[0].driver or 'unknown'}: {use}"


def _describe_kind(gpu: Gpu) -> str:
    facts = [gpu.name]
    if gpu.memory_bytes:
        facts.append(f"{gpu.memory_bytes / _GIBIBYTE:.0f} GiB")
    if gpu.capability_text:
        facts.append(f"compute capability {gpu.capability_text}")
    return ", ".join(facts)


def read_gpu_support() -> GpuSupport:
    gpus = read_gpus()
    return assess_gpus(gpus, installed_versions(_PACKAGES), find_visible(gpus))


def assess_gpus(
    gpus: Sequence[Gpu], versions: Mapping[str, str], visible: Sequence[Gpu]
) -> GpuSupport:
    """Find the installed engines that run on `gpus`, of which CUDA shows `visible`."""
    engines = [_ENGINE] if _ENGINE in versions else []
    # The version of a CPU build of torch ends with `+cpu`, such as 2.13.0+cpu.
    if "+cpu" not in versions.get("torch", "+cpu") and "transformers" in versions:
        engines.append("torch")
    problem, repair = why_no_gpu(gpus, visible), ""
    if problem is not None:
        repair = _repair_host(gpus, visible) if gpus or _ENGINE in versions else ""
    elif _ENGINE not in versions:
        problem, repair = f"`{_ENGINE}` is not installed", REPAIR
    elif "onnxruntime" in versions:
        problem = f"`onnxruntime` and `{_ENGINE}` are both installed and own one import name"
        repair = REPAIR
    else:
        repair = _advise_visible(gpus, visible)
    return GpuSupport(tuple(gpus), tuple(visible), tuple(engines), problem, repair)


def _repair_host(gpus: Sequence[Gpu], visible: Sequence[Gpu]) -> str:
    if not gpus:
        return (
            "run `nvidia-smi` as the user of the server; if only root sees the GPU, enable "
            "`nvidia-persistenced`, which creates the device files at boot"
        )
    if not visible:
        return f"unset `{VISIBLE_GPUS_VARIABLE}`"
    if gpus[0].has_old_driver:
        return f"install driver {MIN_DRIVER_SERIES} or later, then {REPAIR}"
    if advice := _advise_visible(gpus, visible):
        return f"{advice}, then {REPAIR}"
    major, minor = MIN_COMPUTE_CAPABILITY
    return f"use a GPU of compute capability {major}.{minor} or later"


def _advise_visible(gpus: Sequence[Gpu], visible: Sequence[Gpu]) -> str:
    """Return how to show only GPUs on which CUDA runs; empty if it does so already, or cannot."""
    unfit = [gpu.name for gpu in visible if gpu.problem]
    shown = [gpu for gpu in visible if not gpu.problem] or gpus
    fit = [str(index) for index, gpu in enumerate(gpus) if gpu in shown and not gpu.problem]
    if not unfit or not fit:
        return ""
    names, indices = " and ".join(dict.fromkeys(unfit)), ",".join(fit)
    return f"set `{VISIBLE_GPUS_VARIABLE}={indices}`, because CUDA 13 does not run on {names}"


def gpu_environment(requested: int | None) -> dict[str, str]:
    """Return the variable that hides the GPUs of this host if `requested` is 0.

    Ray gives no GPU to actors with `num_gpus: 0`, but does not hide the GPUs from them. The process
    in which the ingress builds models, for example, would use the GPUs.
    """
    return {VISIBLE_GPUS_VARIABLE: ""} if requested == 0 else {}
