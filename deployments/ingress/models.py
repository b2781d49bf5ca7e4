"""How models are described, for every family that lists them."""

from __future__ import annotations

from typing import Any

from deployments.ingress.lanes import LaneBoard
from deployments.ingress.service import InferenceService
from deployments.manifest import ArtifactManifest, Device
from deployments.registry import OpenModel
from deployments.tasks import served_tasks


def model_list(service: InferenceService) -> dict[str, Any]:
    """OpenAI's list shape, which Infinity's clients read too; refused models come last."""
    served = [model_facts(model, service.board) for model in service.registry.open_models()]
    refused = [
        {
            "id": model_id,
            "object": "model",
            "created": 0,
            "owned_by": owner(model_id),
            "state": "refused",
            "reason": error.message,
        }
        for model_id, error in service.registry.refused().items()
    ]
    return {"object": "list", "data": served + refused}


def model_facts(model: OpenModel, board: LaneBoard) -> dict[str, Any]:
    """One model: OpenAI's keys, then ours."""
    manifest = model.manifest
    states = board.states
    lanes = {
        device.value: {
            "compute_type": f"{device}-{candidate.precision}",
            "available": device in states and states[device].available,
            "replicas": states[device].running if device in states else 0,
        }
        for device in Device
        if (candidate := manifest.candidate_for(device)) is not None
    }
    running = any(lane["replicas"] for lane in lanes.values())
    return {
        "id": model.ref.id,
        "object": "model",
        "created": int(model.sealed_s),
        "owned_by": owner(model.ref.id),
        "version": model.ref.version,
        "state": model_state(manifest, running=running),
        "tasks": list(manifest.tasks),
        "served_tasks": served_tasks(manifest),
        "max_tokens": manifest.max_tokens,
        "width": manifest.width,
        "labels": list(manifest.labels),
        "source": manifest.source.model_dump(),
        "lanes": lanes,
    }


def model_state(manifest: ArtifactManifest, *, running: bool) -> str:
    """In one word whether the model can be asked now."""
    if not served_tasks(manifest):
        return "not served"  # compiled and sealed; this release has no route for what it does
    return "ready" if running else "loading"


def owner(model_id: str) -> str:
    """The organisation in front of the slash."""
    return model_id.partition("/")[0] if "/" in model_id else "hundredfold"
