"""How a model is described to clients of the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from deployments.ingress.apis.model_list import is_loaded
from deployments.ingress.apis.open_inference.task_tensors import (
    TensorSpec,
    find_task_tensors,
    list_parameters,
)
from deployments.ingress.service import InferenceService
from deployments.registry import RegisteredModel
from deployments.tasks import TASKS

CONFIG_TYPES = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32"}


class TensorMetadata(TypedDict):
    """A tensor; -1 is any size. Every [n, 1] of BYTES is taken as [n] too."""

    name: str
    datatype: str
    shape: list[int]
    optional: NotRequired[bool]


class TaskMetadata(TypedDict):
    """One of the tasks of a model; the request's tensors tell which, or its parameter `task`."""

    task: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    rows: str  # how the rows of inputs and outputs belong together
    parameters: list[str]  # of the request's `parameters`, or tensors of these names
    list_parameters: list[str]  # those of them that are lists: JSON in a string, or BYTES


class ModelMetadata(TypedDict):
    """A model; `inputs` and `outputs` are those of its own task, the first of `tasks`."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    tasks: list[TaskMetadata]


class IndexEntry(TypedDict):
    """A configured model in the repository index."""

    name: str
    version: NotRequired[str]  # not known of a model that could not be opened
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str


def model_metadata(model: RegisteredModel) -> ModelMetadata:
    """What a client must know to send tensors to the model."""
    tasks = [_task_metadata(task) for task in model.tasks]
    return {
        "name": model.ref.id,
        "versions": [model.ref.version],
        "platform": model.manifest.candidates[0].engine,
        "inputs": tasks[0]["inputs"],
        "outputs": tasks[0]["outputs"],
        "tasks": tasks,
    }


def _task_metadata(task: Any) -> TaskMetadata:
    form = find_task_tensors(task)
    return {
        "task": task,
        "inputs": [_tensor_metadata(spec) for spec in form.inputs],
        "outputs": [_tensor_metadata(spec) for spec in form.outputs],
        "rows": form.rows,
        "parameters": list(TASKS[task].parameters.model_fields),
        "list_parameters": sorted(list_parameters(task)),
    }


def _tensor_metadata(spec: TensorSpec) -> TensorMetadata:
    told: TensorMetadata = {
        "name": spec.name,
        "datatype": spec.datatype,
        "shape": list(spec.shape),
    }
    return {**told, "optional": True} if spec.optional else told


def model_config(model: RegisteredModel, most_items: int) -> dict[str, Any]:
    """Triton's model configuration of the model's own task.

    `max_batch_size` 0 says that the first dimension is no batch: the rows of one request belong
    together. Otherwise it is left out of `dims`, as Triton does.
    """
    form = find_task_tensors(model.tasks[0])
    return {
        "name": model.ref.id,
        "platform": model.manifest.candidates[0].engine,
        "backend": "hundredfold",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": most_items if form.batched else 0,
        "input": _config_tensors(form.inputs, batched=form.batched),
        "output": _config_tensors(form.outputs, batched=form.batched),
    }


def _config_tensors(specs: Sequence[TensorSpec], *, batched: bool) -> list[dict[str, Any]]:
    return [
        {
            "name": spec.name,
            "data_type": CONFIG_TYPES[spec.datatype],
            "dims": list(spec.shape[1:] if batched else spec.shape),
            "optional": spec.optional,
        }
        for spec in specs
    ]


def repository_index(service: InferenceService, *, only_ready: bool) -> list[IndexEntry]:
    """Every configured model, the refused ones last with their reasons."""
    entries: list[IndexEntry] = []
    for model in service.registry.open_models():
        ready = is_loaded(model, service.monitor)
        entries.append(
            {
                "name": model.ref.id,
                "version": model.ref.version,
                "state": "READY" if ready else "LOADING",
                "reason": "" if ready else "no encoder that has the model is running",
            }
        )
    for model_id, error in service.registry.rejected().items():
        entries.append({"name": model_id, "state": "UNAVAILABLE", "reason": error.message})
    return [entry for entry in entries if entry["state"] == "READY" or not only_ready]
