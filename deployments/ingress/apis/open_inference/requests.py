"""From the tensors and parameters of an `infer` request to the question it asks the service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from deployments.errors import InvalidField
from deployments.ingress.apis.open_inference.task_tensors import (
    bind_tensors,
    detect_task_from_tensors,
    find_task_tensors,
    list_parameters,
)
from deployments.ingress.apis.open_inference.tensors import Tensor
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.http.request_options import HEADERS, read_options
from deployments.ingress.service import InferenceRequest, resolve_task
from deployments.registry import RegisteredModel
from deployments.tasks import TASKS

# What the protocol, Triton and MLServer say about the request itself: nothing to a task. There are
# no sequences and no priorities here, and every request has the server's own deadline.
IGNORED_PARAMETERS = frozenset(
    {
        "binary_data_output",
        "priority",
        "timeout",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "headers",
        "content_type",
    }
)
IGNORED_PREFIX = "triton_"
TASK = "task"
OPTION_NAMES = frozenset(HEADERS.values())
OPTION_FIELD_NAMES = {"options": "parameters"}  # they stand among the parameters here


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """The question, and what its client calls the fields that an error may name."""

    question: InferenceRequest
    task: str
    names: Mapping[str, str]


def parse_tensor_request(
    model: RegisteredModel,
    parameters: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    headers: Mapping[str, str],
) -> TensorRequest:
    """What the request asks of `model`; all its rows are one question.

    Raises InvalidField, EmptyInput, UnknownParameter or WrongTask.
    """
    own = {
        name: value
        for name, value in parameters.items()
        if name not in IGNORED_PARAMETERS and not name.startswith(IGNORED_PREFIX)
    }
    named = _parse_task(own.pop(TASK, None)) or detect_task_from_tensors(set(tensors))
    with rename_error_fields(OPTION_FIELD_NAMES):
        options = read_options({name: own.pop(name) for name in OPTION_NAMES & set(own)}, headers)
    task = resolve_task(InferenceRequest(None, task=named, parameters=own), model)
    bound = bind_tensors(task, tensors)
    for name in bound.parameters:
        if name in own:
            raise InvalidField(f"`{name}` is sent twice", field=name)
    form = find_task_tensors(task)
    theirs, ours = form.field_name
    # A reader of texts knows its input by the name it sent.
    called = bound.text_name if ours == "text" else ours
    return TensorRequest(
        question=InferenceRequest(
            inputs=form.to_inputs(bound.columns),
            model_id=model.ref.id,
            task=task,
            parameters={**_parse_lists(task, own), **bound.parameters},
            options=options,
        ),
        task=task,
        names={theirs: called, **OPTION_FIELD_NAMES},
    )


def _parse_task(name: Any) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str) or name not in TASKS:
        known = ", ".join(f"`{task}`" for task in TASKS)
        raise InvalidField(f"`parameters.task` must be one of {known}", field=TASK)
    return name


def _parse_lists(task: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """`parameters`, lists taken out of the strings that the protocol makes of them."""
    lists = list_parameters(task)
    return {
        name: _parse_list(value) if name in lists and isinstance(value, str) else value
        for name, value in parameters.items()
    }


def _parse_list(text: str) -> Any:
    """The list that `text` is in JSON, or `text` itself: labels also come separated by commas."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, list) else text
