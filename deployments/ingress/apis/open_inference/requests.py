"""Requests of the Open Inference Protocol, parsed into inference requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from deployments.errors import InvalidField
from deployments.ingress.apis.open_inference.task_tensors import (
    bind_tensors,
    detect_task_from_tensors,
    find_list_parameters,
    find_task_tensors,
)
from deployments.ingress.apis.open_inference.tensors import Tensor
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.http.request_fields import OPTION_NAMES, read_options
from deployments.ingress.models.resolver import ModelSelection, resolve_task, task_detector
from deployments.ingress.requests import InferenceRequest
from deployments.registry import RegisteredModel
from deployments.tasks import TASKS

# Parameters of the protocol, Triton and MLServer, which are not parameters of a task. message.py
# uses `binary_data_output`. The other parameters have no effect, because this server lacks their
# features, such as stateful sequences. Names that start with TRITON_PREFIX have no effect either.
PROTOCOL_PARAMETERS = frozenset(
    {
        "binary_data_output",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "headers",
        "content_type",
    }
)
TRITON_PREFIX = "triton_"
TASK = "task"
OPTION_FIELD_NAMES = {"options": "parameters"}  # clients send options in `parameters`


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A parsed request. `names` maps fields of `inference_request` to names in the body."""

    inference_request: InferenceRequest
    selection: ModelSelection
    task: str
    names: Mapping[str, str]


def parse_tensor_request(
    name: str,
    model: RegisteredModel,
    parameters: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    headers: Mapping[str, str],
) -> TensorRequest:
    """Parse the tensors of a request, all rows together, into one inference request.

    `name` is the requested name, which resolves to `model`.

    Raises InvalidField, EmptyInput, UnknownParameter or WrongTask.
    """
    used = {
        name: value
        for name, value in parameters.items()
        if name not in PROTOCOL_PARAMETERS and not name.startswith(TRITON_PREFIX)
    }
    requested_task = _parse_task(used.pop(TASK, None)) or detect_task_from_tensors(set(tensors))
    with rename_error_fields(OPTION_FIELD_NAMES):
        in_body = {name: used.pop(name) for name in OPTION_NAMES & set(used)}
        options = read_options({**in_body, **_parse_triton_options(in_body, used)}, headers)
    detect_task = task_detector(InferenceRequest(None, task=requested_task, parameters=used))
    selection = ModelSelection(model, detect_task(model))
    task = resolve_task(selection)
    bound = bind_tensors(task, tensors)
    for parameter in bound.parameters:
        if parameter in used:
            raise InvalidField(f"`{parameter}` is sent twice", field=parameter)
    task_tensors = find_task_tensors(task)
    task_field, tensor_name = task_tensors.field_name
    # Errors use the name that the client chose for its tensor of texts.
    client_name = bound.text_name if tensor_name == "text" else tensor_name
    return TensorRequest(
        inference_request=InferenceRequest(
            inputs=task_tensors.to_inputs(bound.columns),
            model_id=name,
            task=task,
            parameters={**_parse_lists(task, used), **bound.parameters},
            options=options,
        ),
        selection=selection,
        task=task,
        names={task_field: client_name, **OPTION_FIELD_NAMES},
    )


def _parse_triton_options(options: Mapping[str, Any], used: dict[str, Any]) -> dict[str, Any]:
    """Convert Triton's `priority` and `timeout` to options.

    `used` has the parameters that are not in `options`. This function removes `timeout` from
    `used`. The timeout is in microseconds; 0 means none. In Triton, priority 0 is the default and 1
    the highest. Both become `interactive`, larger numbers `batch`. Raises InvalidField for an
    invalid timeout.

    https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_schedule_policy.md
    """
    parsed: dict[str, Any] = {}
    timeout_us, level = used.pop("timeout", None), options.get("priority")
    if timeout_us is not None:
        if type(timeout_us) is not int or timeout_us < 0:
            raise InvalidField("`timeout` must be a number of microseconds", field="timeout")
        if timeout_us:  # 0: no timeout
            parsed["deadline_ms"] = timeout_us / 1000
    if type(level) is int and level >= 0:
        parsed["priority"] = "batch" if level > 1 else "interactive"
    return parsed


def _parse_task(name: Any) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str) or name not in TASKS:
        known = ", ".join(f"`{task}`" for task in TASKS)
        raise InvalidField(f"`parameters.task` must be one of {known}", field=TASK)
    return name


def _parse_lists(task: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parse list parameters. The protocol has no lists, so clients send them as strings."""
    lists = find_list_parameters(task)
    return {
        name: _parse_list(value) if name in lists and isinstance(value, str) else value
        for name, value in parameters.items()
    }


def _parse_list(text: str) -> Any:
    """Parse a JSON list; return any other text as it is, such as labels separated by commas."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, list) else text
