"""Rules about GPU shares (`num_gpus`) and GPU memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import ValidationError

from cluster.config_entries import ApplicationEntry, DeploymentEntry
from cluster.linting.schema import KeyFinding
from deployments.artifacts.types import Device
from deployments.config import AppArgs, HardwareSettings
from deployments.deployment_names import ENCODER_DEPLOYMENTS, GENERATOR_DEPLOYMENTS

ENCODER, GENERATOR = ENCODER_DEPLOYMENTS[Device.GPU], GENERATOR_DEPLOYMENTS[Device.GPU]
_GPU_PROVIDERS = {"CUDAExecutionProvider", "TensorrtExecutionProvider"}


def check_gpu_rules(application: ApplicationEntry) -> Iterator[KeyFinding]:
    """Yield a finding per violated rule. The schema check reports `args` that are invalid."""
    try:
        args = AppArgs.model_validate(application.raw.get("args") or {})
    except ValidationError:
        return
    entries = {entry.name: entry for entry in application.deployments()}
    hardware: dict[str, HardwareSettings | None] = {
        ENCODER: args.encoders.get(Device.GPU),
        GENERATOR: args.generators.get(Device.GPU),
    }
    for name, entry in entries.items():
        settings = hardware.get(name)
        if settings is not None:
            yield from _wrong_share(entry, settings)
        elif name not in hardware and _read_share(entry):
            path = (*entry.path, "ray_actor_options", "num_gpus")
            yield path, f"`{name}` uses no GPU: remove it, or the share is lost for other replicas"
    yield from _shares_of_no_gpu(entries)
    yield from _more_than_the_gpu(application, args)


def _wrong_share(entry: DeploymentEntry, settings: HardwareSettings) -> Iterator[KeyFinding]:
    path, share = (*entry.path, "ray_actor_options", "num_gpus"), _read_share(entry)
    if not share and _GPU_PROVIDERS & set(settings.providers):
        yield path, "must be above 0: else Ray places others on the GPU that this replica uses"
    elif share > 1 and entry.name == ENCODER:
        yield path, f"{share:g} must be at most 1: an encoder runs on one GPU. Raise max_replicas"
    elif share > 1 and share % 1:
        yield path, f"{share:g} must be a whole number: above 1 Ray assigns whole GPUs"


def _shares_of_no_gpu(entries: Mapping[str, DeploymentEntry]) -> Iterator[KeyFinding]:
    """Report GPU shares of encoder and generator that are below 1 but together exceed one GPU."""
    if not entries.keys() >= {ENCODER, GENERATOR}:
        return
    encoder, generator = _read_share(entries[ENCODER]), _read_share(entries[GENERATOR])
    if encoder < 1 and generator < 1 and encoder + generator > 1:
        yield (
            (*entries[GENERATOR].path, "ray_actor_options", "num_gpus"),
            f"{generator:g} and the {encoder:g} of `{ENCODER}` exceed one GPU, so they never share "
            f"one: use at most {1 - encoder:g}, or 1 for a GPU of its own",
        )


def _more_than_the_gpu(application: ApplicationEntry, args: AppArgs) -> Iterator[KeyFinding]:
    """Report memory limits above `gpu_memory`.

    Skip the check if `gpu_memory` is a fraction, because the memory of the GPU is unknown here.
    """
    budget = args.gpu_memory
    if budget <= 1:
        return
    kinds = (("encoders", args.encoders), ("generators", args.generators))
    for kind, by_device in kinds:
        settings = by_device.get(Device.GPU)
        for key in ("pool_bytes", "kv_cache_bytes"):
            value = getattr(settings, key, None)
            if value is not None and value > budget:
                yield (
                    (*application.path, "args", kind, Device.GPU.value, key),
                    f"{value} exceeds args.gpu_memory ({budget:.0f} bytes), the budget of all "
                    "models on a GPU",
                )


def _read_share(entry: DeploymentEntry) -> float:
    options = entry.raw.get("ray_actor_options")
    share = options.get("num_gpus") if isinstance(options, dict) else None
    return float(share) if isinstance(share, int | float) else 0.0
