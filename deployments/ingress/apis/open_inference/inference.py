"""Inference on tensors: from a parsed message to output tensors, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deployments.ingress.apis.open_inference.message import (
    InferRequest,
    OutputSelection,
    read_tensors,
    select_outputs,
)
from deployments.ingress.apis.open_inference.requests import parse_tensor_request
from deployments.ingress.apis.open_inference.task_tensors import find_task_tensors
from deployments.ingress.apis.open_inference.tensors import Tensor
from deployments.ingress.apis.shared.response_headers import inference_headers
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.pipeline import RequestPipeline
from deployments.messages import ModelRef
from deployments.plan.resolution import SEPARATOR, split_name
from deployments.registry import RegisteredModel


class NamedModel(NamedTuple):
    """The model of a request, and its name in the request, which may have a selector."""

    name: str
    model: RegisteredModel


@dataclass(frozen=True, slots=True)
class TensorAnswer:
    """All output tensors of a request, those that it selects, and headers of the response."""

    model: ModelRef
    outputs: Sequence[Tensor]
    selection: Sequence[OutputSelection]
    headers: Mapping[str, str]


async def infer_tensors(
    pipeline: RequestPipeline,
    named: NamedModel,
    message: InferRequest,
    binary: memoryview,
    headers: Mapping[str, str],
) -> TensorAnswer:
    """Run the task of a request. `binary` has its raw tensors, `headers` may set options.

    Raises ServeError; its fields have the names of the message.
    """
    tensors = read_tensors(message.inputs, binary)
    parsed = parse_tensor_request(*named, message.parameters or {}, tensors, headers)
    task_tensors = find_task_tensors(parsed.task)
    selection = select_outputs(message, [spec.name for spec in task_tensors.outputs])
    with rename_error_fields(parsed.names):
        response = await pipeline.infer(parsed.inference_request, parsed.selection)
    outputs = task_tensors.to_outputs(response.result.value)
    return TensorAnswer(response.model.ref, outputs, selection, inference_headers(response))


def add_version(name: str, version: str | None) -> str:
    """Return `id@version` if there is a version, else the name.

    The version replaces a selector in the name.
    """
    return f"{split_name(name)[0]}{SEPARATOR}{version}" if version else name
