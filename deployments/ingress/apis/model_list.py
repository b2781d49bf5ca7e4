"""Descriptions of models, shared by the APIs that list them."""

from __future__ import annotations

from typing import Any

from deployments.artifacts.types import Device
from deployments.ingress.cluster_state import ClusterMonitor
from deployments.ingress.pipeline import RequestPipeline
from deployments.registry import RegisteredModel


def build_model_list(pipeline: RequestPipeline) -> dict[str, Any]:
    """Build OpenAI's list object; rejected models come last."""
    open_models = [
        build_model_facts(model, pipeline.monitor) for model in pipeline.registry.open_models()
    ]
    rejected = [
        {
            "id": model_id,
            "object": "model",
            "created": 0,
            "owned_by": owner(model_id),
            "state": "refused",
            "reason": error.message,
        }
        for model_id, error in pipeline.registry.rejected().items()
    ]
    return {"object": "list", "data": open_models + rejected}


def build_short_path_list(pipeline: RequestPipeline) -> dict[str, Any]:
    """Build the list for `GET /models`, which Infinity's client reads too.

    That client fails without `stats`, and if `owned_by` has any value but its own.
    """
    model_list = build_model_list(pipeline)
    models = [
        {key: value for key, value in model.items() if key != "owned_by"} | {"stats": {}}
        for model in model_list["data"]
    ]
    return {**model_list, "data": models}


def build_model_facts(model: RegisteredModel, monitor: ClusterMonitor) -> dict[str, Any]:
    """Build OpenAI's model object, extended by facts of this server."""
    manifest = model.manifest
    states = monitor.states_for(model)
    devices = {
        device.value: {
            "compute_type": f"{device}-{candidate.precision}",
            "available": device in states and states[device].available,
            "replicas": states[device].running if device in states else 0,
        }
        for device in Device
        if (candidate := manifest.candidate_for(device)) is not None
    }
    config = manifest.generation_config and manifest.generation_config.encoder_decoder
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
        "languages": sorted(config.languages) if config else [],
        "source": manifest.source.model_dump(),
        "devices": devices,
    }


def build_model_status(model: RegisteredModel, monitor: ClusterMonitor) -> dict[str, Any]:
    """Build the body of `/status/{id}`; huggingface_hub reads all four keys."""
    loaded = is_loaded(model, monitor)
    on_gpu = Device.GPU in running_devices(model, monitor)
    return {
        "loaded": loaded,
        "state": "Loaded" if loaded else "Loadable",
        "compute_type": {"gpu": {"gpu": "cuda", "count": 1}} if on_gpu else "cpu",
        "framework": "transformers",
    }


def is_loaded(model: RegisteredModel, monitor: ClusterMonitor) -> bool:
    return bool(running_devices(model, monitor))


def running_devices(model: RegisteredModel, monitor: ClusterMonitor) -> list[Device]:
    """Return the devices with a running replica that serves the model."""
    return [
        device
        for device, state in monitor.states_for(model).items()
        if state.running and model.manifest.candidate_for(device) is not None
    ]


def owner(model_id: str) -> str:
    """Return the organization in a model id, else the name of this server."""
    return model_id.partition("/")[0] if "/" in model_id else "hundredfold"
