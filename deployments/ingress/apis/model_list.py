"""How models are described, for every family that lists them."""

from __future__ import annotations

from typing import Any

from deployments.artifacts.types import Device
from deployments.ingress.cluster_state import ClusterMonitor
from deployments.ingress.service import InferenceService
from deployments.registry import RegisteredModel


def model_list(service: InferenceService) -> dict[str, Any]:
    """OpenAI's list shape; refused models come last."""
    served = [model_facts(model, service.monitor) for model in service.registry.open_models()]
    refused = [
        {
            "id": model_id,
            "object": "model",
            "created": 0,
            "owned_by": owner(model_id),
            "state": "refused",
            "reason": error.message,
        }
        for model_id, error in service.registry.rejected().items()
    ]
    return {"object": "list", "data": served + refused}


def short_path_list(service: InferenceService) -> dict[str, Any]:
    """`model_list` as `GET /models` gives it, where Infinity's client reads it too.

    That one fails without `stats`, and for any owner that is not Infinity.
    """
    told = model_list(service)
    models = [{k: v for k, v in one.items() if k != "owned_by"} for one in told["data"]]
    return {**told, "data": [{**one, "stats": {}} for one in models]}


def model_facts(model: RegisteredModel, monitor: ClusterMonitor) -> dict[str, Any]:
    """One model: OpenAI's keys, then ours."""
    manifest = model.manifest
    states = monitor.states_for(model)
    encoders = {
        device.value: {
            "compute_type": f"{device}-{candidate.precision}",
            "available": device in states and states[device].available,
            "replicas": states[device].running if device in states else 0,
        }
        for device in Device
        if (candidate := manifest.candidate_for(device)) is not None
    }
    return {
        "id": model.ref.id,
        "object": "model",
        "created": int(model.sealed_s),
        "owned_by": owner(model.ref.id),
        "version": model.ref.version,
        "state": "ready" if is_loaded(model, monitor) else "loading",
        "tasks": model.tasks,
        "max_tokens": manifest.max_tokens,
        "width": manifest.output_width,
        "labels": list(manifest.labels),
        "source": manifest.source.model_dump(),
        "devices": encoders,
    }


def model_status(model: RegisteredModel, monitor: ClusterMonitor) -> dict[str, Any]:
    """What the hosted API answered at `/status/{id}`; all four keys are read by its client."""
    loaded = is_loaded(model, monitor)
    on_gpu = Device.GPU in running_devices(model, monitor)
    return {
        "loaded": loaded,
        "state": "Loaded" if loaded else "Loadable",
        "compute_type": {"gpu": {"gpu": "cuda", "count": 1}} if on_gpu else "cpu",
        "framework": "transformers",
    }


def is_loaded(model: RegisteredModel, monitor: ClusterMonitor) -> bool:
    """Whether an encoder that has the model can answer now."""
    return bool(running_devices(model, monitor))


def running_devices(model: RegisteredModel, monitor: ClusterMonitor) -> list[Device]:
    """The encoders that have the model and can answer now."""
    return [
        device
        for device, state in monitor.states_for(model).items()
        if state.running and model.manifest.candidate_for(device) is not None
    ]


def owner(model_id: str) -> str:
    """The organisation in front of the slash."""
    return model_id.partition("/")[0] if "/" in model_id else "hundredfold"
