"""Tensors of each task, and their conversion to task inputs and from task outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import orjson

from deployments.artifacts.types import TaskName
from deployments.errors import EmptyInput, InvalidField
from deployments.ingress.apis.open_inference.tensors import Datatype, Tensor
from deployments.ingress.http.api import build_schema
from deployments.tasks import TASKS, Task

InputTexts = Mapping[str, list[str]]  # texts by input name

# Names of the text input. The metadata reports the first. Clients of other servers send the rest.
TEXT_NAMES = ("text", "args", "inputs", "input-0", "text_input", "text_inputs")
# MLServer's content type of BYTES tensors whose elements are JSON values.
JSON_ROWS = "hg_jsonlist"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a task, for the metadata. A size of -1 means any size."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTensors:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    rows: str  # relation of input rows to output rows, as a text for the metadata
    to_inputs: Callable[[InputTexts], Any]  # raises InvalidField
    to_outputs: Callable[[Any], tuple[Tensor, ...]]
    batched: bool = True  # row i of the outputs belongs to row i of the inputs
    # Prefix of field paths in errors of the task, and the text that replaces this prefix.
    field_name: tuple[str, str] = ("inputs.", "")


@dataclass(frozen=True, slots=True)
class BoundTensors:
    """The tensors of a request, separated into input texts and parameters."""

    columns: InputTexts
    parameters: Mapping[str, Any]
    text_name: str  # name of the text input in the request


def _column(name: str, rows: int = -1, *, optional: bool = False) -> TensorSpec:
    return TensorSpec(name, "BYTES", (rows, 1), optional)


def _read_texts(columns: InputTexts) -> list[str]:
    return columns["text"]


def _pair_texts(columns: InputTexts) -> list[Any]:
    texts, pairs = columns["text"], columns.get("text_pair")
    if pairs is None:
        return texts
    _check_rows("text_pair", len(pairs), len(texts))
    return [{"text": a, "text_pair": b} for a, b in zip(texts, pairs, strict=True)]


def _convert_questions(columns: InputTexts) -> dict[str, list[str]]:
    questions, contexts = columns["question"], columns["context"]
    if len(contexts) == 1:
        contexts = contexts * len(questions)
    _check_rows("context", len(contexts), len(questions))
    return {"question": questions, "context": contexts}


def _check_rows(name: str, rows: int, expected: int) -> None:
    if rows != expected:
        raise InvalidField(f"`{name}` has {rows} rows; expected {expected}", field=name)


def _build_embedding(value: Any) -> tuple[Tensor, ...]:
    return (Tensor("embedding", "FP32", value.shape, value),)


def _build_labels(value: Any) -> tuple[Tensor, ...]:
    """Build rectangular tensors: all texts have the same number of labels."""
    pairs = [[(item["label"], item["score"]) for item in row] for row in value]
    return _build_label_tensors(pairs)


def _build_candidate_labels(value: Any) -> tuple[Tensor, ...]:
    return _build_label_tensors([list(zip(v["labels"], v["scores"], strict=True)) for v in value])


def _build_label_tensors(rows: Sequence[Sequence[tuple[str, float]]]) -> tuple[Tensor, ...]:
    shape = (len(rows), len(rows[0]))
    labels = [label for row in rows for label, _ in row]
    scores = np.array([[score for _, score in row] for row in rows], dtype=np.float32)
    return Tensor("label", "BYTES", shape, labels), Tensor("score", "FP32", shape, scores)


def _build_json_rows(value: Any) -> tuple[Tensor, ...]:
    rows = [orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY).decode() for row in value]
    return (Tensor("output", "BYTES", (len(rows), 1), rows, JSON_ROWS),)


_LABELS = (TensorSpec("label", "BYTES", (-1, -1)), TensorSpec("score", "FP32", (-1, -1)))
_JSON = (_column("output"),)
_TEXT_FIELD = ("inputs", "text")

TASK_TENSORS: Mapping[str, TaskTensors] = {
    TaskName.FEATURE_EXTRACTION: TaskTensors(
        inputs=(_column("text"),),
        outputs=(TensorSpec("embedding", "FP32", (-1, -1)),),
        rows="row i of `embedding` is the vector of `text` i",
        to_inputs=_read_texts,
        to_outputs=_build_embedding,
        field_name=_TEXT_FIELD,
    ),
    TaskName.TEXT_CLASSIFICATION: TaskTensors(
        inputs=(_column("text"), _column("text_pair", optional=True)),
        outputs=_LABELS,
        rows="row i has the labels of `text` i, or of `text` i with `text_pair` i, best first",
        to_inputs=_pair_texts,
        to_outputs=_build_labels,
        field_name=_TEXT_FIELD,
    ),
    TaskName.ZERO_SHOT_CLASSIFICATION: TaskTensors(
        inputs=(_column("text"),),
        outputs=_LABELS,
        rows="row i has the `candidate_labels` for `text` i, best first",
        to_inputs=_read_texts,
        to_outputs=_build_candidate_labels,
        field_name=_TEXT_FIELD,
    ),
    TaskName.QUESTION_ANSWERING: TaskTensors(
        inputs=(_column("question"), _column("context")),
        outputs=_JSON,
        rows="row i of `output` answers `question` i from `context` i, or from the only `context`",
        to_inputs=_convert_questions,
        to_outputs=_build_json_rows,
    ),
}

# Tensors that identify a task of TASK_TENSORS when a request has all of them.
TASK_SIGNATURES: Mapping[frozenset[str], str] = {
    frozenset({"question", "context"}): TaskName.QUESTION_ANSWERING,
    frozenset({"candidate_labels"}): TaskName.ZERO_SHOT_CLASSIFICATION,
    frozenset({"text_pair"}): TaskName.TEXT_CLASSIFICATION,
}


@cache
def find_task_tensors(task: str) -> TaskTensors:
    """Return the entry of TASK_TENSORS, or derive one from the input type of the task.

    A task whose input is an object gets one tensor per property. The tensor of a string property
    has one row. Any other task gets the single tensor `text`. Derived outputs are JSON.
    """
    return TASK_TENSORS.get(task) or _derive_tensors(TASKS[task])


def _derive_tensors(task: Task) -> TaskTensors:
    properties = _object_properties(task)
    if not properties:
        return TaskTensors(
            inputs=(_column("text"),),
            outputs=_JSON,
            rows="row i of `output` is the result for `text` i, as JSON",
            to_inputs=_read_texts,
            to_outputs=_build_json_rows,
            field_name=_TEXT_FIELD,
        )
    single = frozenset(name for name, field in properties.items() if field.get("type") == "string")

    def to_inputs(columns: InputTexts) -> dict[str, Any]:
        for name in single:
            _check_rows(name, len(columns[name]), 1)
        return {name: column[0] if name in single else column for name, column in columns.items()}

    return TaskTensors(
        inputs=tuple(_column(name, 1 if name in single else -1) for name in properties),
        outputs=_JSON,
        rows="row i of `output` is item i of the result, as JSON",
        to_inputs=to_inputs,
        to_outputs=_build_json_rows,
        batched=False,
    )


def _object_properties(task: Task) -> Mapping[str, Any]:
    """Return the properties of a task whose inputs are an object; empty for other inputs."""
    schema = task.inputs.schema()
    return schema.get("properties", {}) if schema.get("type") == "object" else {}


def detect_task_from_tensors(names: set[str]) -> str | None:
    """Return the first task whose distinctive tensors are all among `names`, else None."""
    return next((task for needed, task in _signatures().items() if needed <= names), None)


@cache
def _signatures() -> Mapping[frozenset[str], str]:
    objects = {name: frozenset(_object_properties(task)) for name, task in TASKS.items()}
    derived = {properties: name for name, properties in objects.items() if properties}
    return {**derived, **TASK_SIGNATURES}


@cache
def find_list_parameters(task: str) -> frozenset[str]:
    """Return the parameters of the task that may be lists."""
    schema = build_schema(TASKS[task].parameters)
    fields: Mapping[str, Any] = schema.get("properties", {})
    return frozenset(name for name, field in fields.items() if _accepts_list(field))


def _accepts_list(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "array" or any(map(_accepts_list, schema.get("anyOf", ())))


def bind_tensors(task: str, tensors: Mapping[str, Tensor]) -> BoundTensors:
    """Assign each tensor to an input or a parameter of the task.

    Raises InvalidField for an unknown, missing or invalid tensor, EmptyInput for an empty one.
    """
    task_tensors, remaining = find_task_tensors(task), dict(tensors)
    input_names = {spec.name for spec in task_tensors.inputs}
    known = [name for name in TASKS[task].parameters.model_fields if name not in input_names]
    parameters = {
        name: _read_parameter(task, remaining.pop(name)) for name in known if name in remaining
    }
    text_name = _find_text_name(
        {k: v for k, v in remaining.items() if k == "text" or k not in input_names}
    )
    columns: dict[str, list[str]] = {}
    for spec in task_tensors.inputs:
        name = text_name if spec.name == "text" else spec.name
        if name in remaining:
            columns[spec.name] = read_column(remaining.pop(name))
        elif not spec.optional:
            required = ", ".join(f"`{i.name}`" for i in task_tensors.inputs if not i.optional)
            raise InvalidField(
                f"`{name}` is missing; `{task}` requires the inputs {required}", field=name
            )
    for name in remaining:
        raise InvalidField(f"`{name}` is not an input of `{task}`", field=name)
    return BoundTensors(columns, parameters, text_name)


def _find_text_name(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the tensor with the texts.

    It is the first of TEXT_NAMES among the tensors, else the name of the only BYTES tensor, else
    `text`.
    """
    known_name = next((name for name in TEXT_NAMES if name in tensors), None)
    if known_name is not None:
        return known_name
    candidates = [name for name, tensor in tensors.items() if tensor.datatype == "BYTES"]
    return candidates[0] if len(candidates) == 1 else "text"


def read_column(tensor: Tensor) -> list[str]:
    """Return the texts of a tensor [n], [n, 1] or [1, n]. Raises InvalidField or EmptyInput."""
    if tensor.datatype != "BYTES":
        raise InvalidField(
            f"`{tensor.name}` must be BYTES, not {tensor.datatype}", field=tensor.name
        )
    if sum(size != 1 for size in tensor.shape) > 1:
        raise InvalidField(
            f"`{tensor.name}` must have the shape [n] or [n, 1], not {list(tensor.shape)}",
            field=tensor.name,
        )
    texts = list(tensor.values)
    if not texts:
        raise EmptyInput(f"`{tensor.name}` is empty", field=tensor.name)
    return texts


def _read_parameter(task: str, tensor: Tensor) -> Any:
    values = tensor.values
    plain = values.tolist() if isinstance(values, np.ndarray) else list(values)
    if tensor.name in find_list_parameters(task):
        return plain
    if len(plain) != 1:
        raise InvalidField(f"`{tensor.name}` must have one value", field=tensor.name)
    return plain[0]
