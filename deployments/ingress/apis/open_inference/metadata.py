"""Model metadata of the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from deployments.ingress.apis.open_inference.task_tensors import (
    TensorSpec,
    find_list_parameters,
    find_task_tensors,
)
from deployments.ingress.apis.shared.model_list import is_loaded
from deployments.ingress.pipeline import RequestPipeline
from deployments.keys.caller import current_caller
from deployments.registry import RegisteredModel
from deployments.tasks import TASKS

CONFIG_TYPES = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32"}


class TensorMetadata(TypedDict):
    """A tensor. A size of -1 means any size. BYTES of shape [n, 1] may also be sent as [n]."""

    name: str
    datatype: str
    shape: list[int]
    optional: NotRequired[bool]


class TaskMetadata(TypedDict):
    """A task of a model.

    A request selects the task by the parameter `task`, by tensor names or by the task's parameters.
    Otherwise the first task of the model runs.
    """

    task: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    rows: str  # relation of input rows to output rows
    parameters: list[str]  # sent in `parameters`, or as tensors with these names
    list_parameters: list[str]  # sent as a JSON list in a string, or as BYTES tensors


class ModelMetadata(TypedDict):
    """A model. `inputs` and `outputs` repeat the tensors of its first task."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    tasks: list[TaskMetadata]


UNLOADED = "unloaded"  # Triton's reason for a model that is not in memory


class IndexEntry(TypedDict):
    """A model in the repository index."""

    name: str
    version: NotRequired[str]  # absent for rejected models
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str


def model_metadata(model: RegisteredModel, versions: Sequence[str]) -> ModelMetadata:
    """Describe a model. `versions` lists all usable versions."""
    tasks = [_task_metadata(task) for task in model.tasks]
    return {
        "name": model.ref.id,
        "versions": list(versions),
        "platform": model.manifest.candidates[0].engine,
        "inputs": tasks[0]["inputs"],
        "outputs": tasks[0]["outputs"],
        "tasks": tasks,
    }


def _task_metadata(task: Any) -> TaskMetadata:
    task_tensors = find_task_tensors(task)
    return {
        "task": task,
        "inputs": [_tensor_metadata(spec) for spec in task_tensors.inputs],
        "outputs": [_tensor_metadata(spec) for spec in task_tensors.outputs],
        "rows": task_tensors.rows,
        "parameters": list(TASKS[task].parameters.model_fields),
        "list_parameters": sorted(find_list_parameters(task)),
    }


def _tensor_metadata(spec: TensorSpec) -> TensorMetadata:
    metadata: TensorMetadata = {
        "name": spec.name,
        "datatype": spec.datatype,
        "shape": list(spec.shape),
    }
    return {**metadata, "optional": True} if spec.optional else metadata


def model_config(model: RegisteredModel, max_items: int) -> dict[str, Any]:
    """Build Triton's configuration for the first task of the model.

    `max_batch_size` is 0 if the rows of a request belong together: the first dimension is then not
    a batch. Otherwise `dims` omits the first dimension, as in Triton.
    """
    task_tensors = find_task_tensors(model.tasks[0])
    return {
        "name": model.ref.id,
        "platform": model.manifest.candidates[0].engine,
        "backend": "hundredfold",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": max_items if task_tensors.batched else 0,
        "input": _config_tensors(task_tensors.inputs, batched=task_tensors.batched),
        "output": _config_tensors(task_tensors.outputs, batched=task_tensors.batched),
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


def repository_index(
    pipeline: RequestPipeline,
    stored: Mapping[str, str],
    loaded: Collection[tuple[str, str]],
    *,
    only_ready: bool,
) -> list[IndexEntry]:
    """List the configured models, then the other models of the store, which load on demand.

    Rejected models come last, with the reason. `stored` maps model ids to default versions.
    `loaded` has the id and version of each model in the memory of a replica. With `only_ready`,
    omit models whose state is not READY.
    """
    entries: list[IndexEntry] = []
    for model in pipeline.permitted.open_models():
        ready = is_loaded(model, pipeline.monitor)
        entries.append(
            {
                "name": model.ref.id,
                "version": model.ref.version,
                "state": "READY" if ready else "LOADING",
                "reason": "" if ready else "no running replica serves the model",
            }
        )
    rejected = pipeline.permitted.rejected()
    known = {*rejected, *(entry["name"] for entry in entries)}
    may_use = current_caller().may_use_model
    for model_id, version in stored.items():
        if model_id not in known and may_use(model_id):
            entry: IndexEntry = {
                "name": model_id,
                "version": version,
                "state": "READY",
                "reason": "",
            }
            if (model_id, version) not in loaded:
                entry = {**entry, "state": "UNAVAILABLE", "reason": UNLOADED}
            entries.append(entry)
    for model_id, error in rejected.items():
        entries.append({"name": model_id, "state": "UNAVAILABLE", "reason": error.message})
    return [entry for entry in entries if entry["state"] == "READY" or not only_ready]
