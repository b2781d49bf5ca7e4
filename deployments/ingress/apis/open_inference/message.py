"""The message of `infer`: a JSON header, and behind it the raw tensors, in order."""

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

# Where the JSON ends; without it the whole body is JSON.
LENGTH_HEADER = "inference-header-content-length"
# Digits of the largest length that is read: Python refuses numbers of thousands of them.
LENGTH_DIGITS = 18

Name = Annotated[str, Field(min_length=1, max_length=256)]


class _ProtocolModel(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class InputTensor(_ProtocolModel):
    """An input with its values in `data`, or with `parameters.binary_data_size` bytes."""

    name: Name
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=8)]
    datatype: Datatype
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class RequestedOutput(_ProtocolModel):
    """An output that is wanted; `parameters.binary_data` says how."""

    name: Name
    parameters: dict[str, Any] | None = None


class InferRequest(_ProtocolModel):
    """The JSON of a request. Keys it does not name are ignored, as the protocol wants."""

    id: str | None = None
    parameters: dict[str, Any] | None = None
    inputs: Many[InputTensor]
    outputs: Annotated[list[RequestedOutput], FailFastList()] | None = None


class OutputTensor(_ProtocolModel):
    """An output with its values in `data`, or with `parameters.binary_data_size` bytes."""

    name: str
    datatype: Datatype
    shape: list[int]
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class InferResponse(_ProtocolModel):
    """The JSON of an answer."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


@dataclass(frozen=True, slots=True)
class OutputSelection:
    """An output by name, and how it travels."""

    name: str
    binary: bool


def split_body(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    """The JSON and what stands behind it. Raises MalformedBody for a length that cannot be."""
    if header_length is None:
        return body, memoryview(b"")
    digits = header_length.strip()
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > LENGTH_DIGITS:
        raise MalformedBody(f"`{LENGTH_HEADER}` must be a number of bytes", field=LENGTH_HEADER)
    length = int(digits)
    if length > len(body):
        raise MalformedBody(
            f"`{LENGTH_HEADER}` is {length}, the body has {len(body)} bytes", field=LENGTH_HEADER
        )
    return body[:length], memoryview(body)[length:]


def read_tensors(inputs: Sequence[InputTensor], binary: memoryview) -> dict[str, Tensor]:
    """The inputs by name; `binary` is what stands behind the JSON, to be used up by them.

    Raises InvalidField or MalformedBody.
    """
    tensors: dict[str, Tensor] = {}
    start = 0
    for given in inputs:
        name = given.name
        if name in tensors:
            raise InvalidField(f"`{name}` is sent twice", field=name)
        size = _binary_size(given)
        if size is not None:
            if size > len(binary) - start:
                raise InvalidField(
                    f"`{name}` is said to have {size} bytes; {len(binary) - start} are left",
                    field=name,
                )
            raw = binary[start : start + size]
            tensors[name] = parse_binary_tensor(name, given.datatype, given.shape, raw)
            start += size
        elif given.data is not None:
            tensors[name] = parse_json_tensor(name, given.datatype, given.shape, given.data)
        else:
            raise InvalidField(f"`{name}` has no data", field=name)
    if start != len(binary):
        raise MalformedBody(f"{len(binary) - start} bytes belong to no input", field="body")
    return tensors


def _binary_size(given: InputTensor) -> int | None:
    parameters = given.parameters or {}
    _reject_shared_memory(given.name, parameters)
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise InvalidField(
            f"`{given.name}.binary_data_size` must be a number of bytes", field=given.name
        )
    if given.data is not None:
        raise InvalidField(f"`{given.name}` has both `data` and binary data", field=given.name)
    return size


def select_outputs(request: InferRequest, known: Sequence[str]) -> list[OutputSelection]:
    """The outputs asked for, all of them where none is named. Raises InvalidField."""
    by_default = _flag("binary_data_output", request.parameters or {})
    if not request.outputs:
        return [OutputSelection(name, bool(by_default)) for name in known]
    wanted: dict[str, OutputSelection] = {}
    for asked in request.outputs:
        parameters = asked.parameters or {}
        if asked.name not in known:
            names = ", ".join(f"`{name}`" for name in known)
            raise InvalidField(f"there is no output `{asked.name}`, only {names}", field="outputs")
        if asked.name in wanted:
            raise InvalidField(f"output `{asked.name}` is asked for twice", field="outputs")
        if parameters.get("classification"):
            raise InvalidField(
                f"output `{asked.name}`: `classification` is not supported; ask a classifier "
                "with the parameter `top_k`",
                field="outputs",
            )
        _reject_shared_memory(asked.name, parameters)
        own = _flag("binary_data", parameters)
        wanted[asked.name] = OutputSelection(asked.name, bool(by_default if own is None else own))
    return list(wanted.values())


def _flag(name: str, parameters: Mapping[str, Any]) -> bool | None:
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
    wanted: Sequence[OutputSelection],
    headers: Mapping[str, str],
) -> Response:
    """The answer: `head` and the wanted tensors, binary ones behind the JSON."""
    by_name = {tensor.name: tensor for tensor in tensors}
    outputs: list[dict[str, Any]] = []
    raw: list[bytes | memoryview] = []
    for asked in wanted:
        tensor = by_name[asked.name]
        parameters: dict[str, Any] = {}
        if tensor.content_type is not None:
            parameters["content_type"] = tensor.content_type
        output = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if asked.binary:
            raw.append(tensor.to_binary())
            parameters["binary_data_size"] = len(raw[-1])
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
