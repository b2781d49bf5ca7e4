"""Bodies of the route `infer`: JSON, then any tensors in binary form, in the order of the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from deployments.errors import InvalidField, MalformedBody
from deployments.ingress.apis.open_inference.tensors import (
    Datatype,
    Tensor,
    parse_binary_tensor,
    parse_json_tensor,
)
from deployments.ingress.http.bodies import json_response
from deployments.tasks.inputs import FailFastList, Many

# HTTP header with the length of the JSON in bytes. Without it, the whole body is JSON.
LENGTH_HEADER = "inference-header-content-length"
SIZE_PARAMETER = "binary_data_size"  # of a tensor: bytes of its values after the JSON
# Maximum digits of a length: int() raises for thousands of digits.
LENGTH_DIGITS = 18

Name = Annotated[str, Field(min_length=1, max_length=256)]


class _ProtocolModel(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class InputTensor(_ProtocolModel):
    """An input with values in `data`, or `parameters.binary_data_size` bytes after the JSON."""

    name: Name
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=8)]
    datatype: Datatype
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class RequestedOutput(_ProtocolModel):
    """A requested output. `parameters.binary_data` selects the binary form."""

    name: Name
    parameters: dict[str, Any] | None = None


class InferRequest(_ProtocolModel):
    """JSON of a request. Unknown keys are ignored, as the protocol requires."""

    id: str | None = None
    parameters: dict[str, Any] | None = None
    inputs: Many[InputTensor]
    outputs: Annotated[list[RequestedOutput], FailFastList()] | None = None


class OutputTensor(_ProtocolModel):
    """An output with values in `data`, or `parameters.binary_data_size` bytes after the JSON."""

    name: str
    datatype: Datatype
    shape: list[int]
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class InferResponse(_ProtocolModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


@dataclass(frozen=True, slots=True)
class OutputSelection:
    """A requested output, and whether it is sent as raw bytes or in the JSON."""

    name: str
    binary: bool


def split_body(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    """Split a body into JSON and raw tensors. Raises MalformedBody for an invalid length."""
    if header_length is None:
        return body, memoryview(b"")
    digits = header_length.strip()
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > LENGTH_DIGITS:
        raise MalformedBody(f"`{LENGTH_HEADER}` must be a number of bytes", field=LENGTH_HEADER)
    length = int(digits)
    if length > len(body):
        raise MalformedBody(
            f"`{LENGTH_HEADER}` is {length}; the body has {len(body)} bytes", field=LENGTH_HEADER
        )
    return body[:length], memoryview(body)[length:]


def read_tensors(inputs: Sequence[InputTensor], binary: memoryview) -> dict[str, Tensor]:
    """Return the inputs by name. Together they must consume all bytes of `binary`.

    Raises InvalidField for an invalid input, MalformedBody for bytes that belong to no input.
    """
    tensors: dict[str, Tensor] = {}
    start = 0
    for tensor_input in inputs:
        name = tensor_input.name
        if name in tensors:
            raise InvalidField(f"`{name}` is sent twice", field=name)
        size = _binary_size(tensor_input)
        if size is not None:
            if size > len(binary) - start:
                raise InvalidField(
                    f"`{name}` has `binary_data_size` {size}; {len(binary) - start} bytes remain",
                    field=name,
                )
            raw = binary[start : start + size]
            tensors[name] = parse_binary_tensor(
                name, tensor_input.datatype, tensor_input.shape, raw
            )
            start += size
        elif tensor_input.data is not None:
            tensors[name] = parse_json_tensor(
                name, tensor_input.datatype, tensor_input.shape, tensor_input.data
            )
        else:
            raise InvalidField(f"`{name}` has no data", field=name)
    if start != len(binary):
        raise MalformedBody(f"{len(binary) - start} bytes belong to no input", field="body")
    return tensors


def _binary_size(tensor_input: InputTensor) -> int | None:
    parameters = tensor_input.parameters or {}
    _reject_shared_memory(tensor_input.name, parameters)
    size = parameters.get(SIZE_PARAMETER)
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise InvalidField(
            f"`{tensor_input.name}.binary_data_size` must be a number of bytes",
            field=tensor_input.name,
        )
    if tensor_input.data is not None:
        raise InvalidField(
            f"`{tensor_input.name}` has both `data` and binary data", field=tensor_input.name
        )
    return size


def select_outputs(request: InferRequest, known: Sequence[str]) -> list[OutputSelection]:
    """Return the requested outputs, all by default.

    Raises InvalidField for an unknown, repeated or unsupported output.
    """
    default_binary = _parse_flag("binary_data_output", request.parameters or {})
    if not request.outputs:
        return [OutputSelection(name, bool(default_binary)) for name in known]
    selection: dict[str, OutputSelection] = {}
    for output in request.outputs:
        parameters = output.parameters or {}
        if output.name not in known:
            names = ", ".join(f"`{name}`" for name in known)
            raise InvalidField(
                f"unknown output `{output.name}`. Known outputs: {names}", field="outputs"
            )
        if output.name in selection:
            raise InvalidField(f"output `{output.name}` is requested twice", field="outputs")
        if parameters.get("classification"):
            raise InvalidField(
                f"output `{output.name}`: `classification` is not supported. Use the parameter "
                "`top_k` of a classification model.",
                field="outputs",
            )
        _reject_shared_memory(output.name, parameters)
        binary = _parse_flag("binary_data", parameters)
        is_binary = bool(default_binary if binary is None else binary)
        selection[output.name] = OutputSelection(output.name, is_binary)
    return list(selection.values())


def _parse_flag(name: str, parameters: Mapping[str, Any]) -> bool | None:
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidField(f"`parameters.{name}` must be a boolean", field=f"parameters.{name}")
    return value


def _reject_shared_memory(name: str, parameters: Mapping[str, Any]) -> None:
    if "shared_memory_region" in parameters:
        raise InvalidField(f"`{name}`: shared memory is not supported", field=name)


def infer_response(
    head: Mapping[str, Any],
    tensors: Sequence[Tensor],
    selection: Sequence[OutputSelection],
    headers: Mapping[str, str],
) -> Response:
    """Build the response from `head` and the selected tensors. Raw bytes follow the JSON."""
    by_name = {tensor.name: tensor for tensor in tensors}
    outputs: list[dict[str, Any]] = []
    raw: list[bytes | memoryview] = []
    for selected in selection:
        tensor = by_name[selected.name]
        parameters: dict[str, Any] = {}
        if tensor.content_type is not None:
            parameters["content_type"] = tensor.content_type
        output = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if selected.binary:
            raw.append(tensor.to_binary())
            parameters[SIZE_PARAMETER] = len(raw[-1])
        else:
            output["data"] = tensor.to_json()
        outputs.append(output | ({"parameters": parameters} if parameters else {}))
    message = {**head, "outputs": outputs}
    if not raw:
        return json_response(message, headers=headers)
    json = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(
        b"".join([json, *raw]),
        headers={**headers, LENGTH_HEADER: str(len(json))},
        media_type="application/octet-stream",
    )
