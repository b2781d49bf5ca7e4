"""Messages of the Open Inference Protocol over gRPC, converted to and from those over HTTP.

A gRPC message is a protobuf after five bytes: whether it is compressed, and its length. protoc has
written grpc_service.binpb from grpc_service.proto and grpc_health.proto (tests/unit compares them).
Generated Python code would only run with the protobuf release for which it was generated.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from deployments.errors import BodyTooLarge, InvalidField, MalformedBody
from deployments.grpc_status import INFERENCE_PACKAGE
from deployments.ingress.apis.open_inference.message import SIZE_PARAMETER, InferRequest
from deployments.ingress.apis.open_inference.tensors import Tensor
from deployments.ingress.http.api import parse_body
from deployments.ingress.http.bodies import select_decoder

PREFIX = struct.Struct(">BI")
SERVICE_FILE = "grpc_service.binpb"
# Limit of the tensors, outputs and parameters of a request, which has a few of each. A message of
# two megabytes can have a million, whose conversion would take seconds.
MAX_PARTS = 1_000
# Field of `contents` by datatype. Other datatypes are sent as raw bytes only.
CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


@cache
def find_type(name: str, package: str = INFERENCE_PACKAGE) -> Any:
    """Return the class of the messages of this name, such as `ModelInferRequest`."""
    return message_factory.GetMessageClass(
        _load_service().FindMessageTypeByName(f"{package}.{name}")
    )


@cache
def _load_service() -> descriptor_pool.DescriptorPool:
    # A pool of its own: a client library in this process has other descriptions of these messages.
    pool = descriptor_pool.DescriptorPool()
    raw = resources.files(__package__).joinpath(SERVICE_FILE).read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(raw).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


def inflate_frame(frame: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the frame of the only message of a request, without compression.

    `encoding` is that of a compressed message. Raises BodyTooLarge, MalformedBody or
    UnsupportedEncoding.
    """
    if len(frame) < PREFIX.size:
        raise MalformedBody("the request has no message", field="body")
    compressed, length = PREFIX.unpack_from(frame)
    raw = frame[PREFIX.size :]
    if length != len(raw):
        raise MalformedBody(
            f"the message is {length} bytes long; {len(raw)} bytes follow. A call has one message.",
            field="body",
        )
    if not compressed:
        return frame
    if compressed > 1 or encoding in ("", "identity"):
        raise MalformedBody(
            "the message is marked as compressed, but no `grpc-encoding` says how", field="body"
        )
    decoder = select_decoder(encoding, "grpc-encoding")
    raw = decoder.feed(raw, max_bytes)
    if len(raw) > max_bytes:
        raise BodyTooLarge(
            f"the message has more than {max_bytes} bytes. Split the request.", field="body"
        )
    decoder.finish()
    return _frame(raw)


def parse_message(name: str, frame: bytes, package: str = INFERENCE_PACKAGE) -> Any:
    """Parse the message of a frame without compression. Raises MalformedBody."""
    try:
        return find_type(name, package).FromString(frame[PREFIX.size :])
    except DecodeError as exc:
        raise MalformedBody(f"the message is not a protobuf `{name}`", field="body") from exc


def frame_message(message: Any) -> bytes:
    return _frame(message.SerializeToString())


def _frame(raw: bytes) -> bytes:
    return PREFIX.pack(0, len(raw)) + raw


def convert_request(request: Any) -> tuple[InferRequest, memoryview]:
    """Convert a ModelInferRequest to the message over HTTP and the raw tensors that follow it.

    Raises EmptyInput, InvalidField or MalformedBody.
    """
    tensors, raw = request.inputs, request.raw_input_contents
    _check_parts(request)
    if raw and len(raw) != len(tensors):
        raise InvalidField(
            f"`raw_input_contents` has {len(raw)} tensors; `inputs` has {len(tensors)}",
            field="raw_input_contents",
        )
    binary: list[bytes] = []
    inputs = [
        _convert_input(tensor, raw[index] if raw else None, binary)
        for index, tensor in enumerate(tensors)
    ]
    outputs = [
        {"name": output.name, "parameters": _convert_parameters(output.parameters)}
        for output in request.outputs
    ]
    message = {
        "id": request.id or None,
        "parameters": _convert_parameters(request.parameters),
        "inputs": inputs,
        "outputs": outputs,
    }
    return parse_body(InferRequest, message), memoryview(b"".join(binary))


def _check_parts(request: Any) -> None:
    parts = len(request.inputs) + len(request.outputs)
    if parts <= MAX_PARTS:
        parts += sum(len(each.parameters) for each in (request, *request.inputs, *request.outputs))
    if parts > MAX_PARTS:
        raise MalformedBody(
            f"the request has more than {MAX_PARTS} tensors and parameters", field="body"
        )


def _convert_input(tensor: Any, raw: bytes | None, binary: list[bytes]) -> dict[str, Any]:
    """Convert one input. Append its bytes to `binary` if they follow the message."""
    parameters, data = _convert_parameters(tensor.parameters), None
    parameters.pop(SIZE_PARAMETER, None)  # the sizes of raw tensors are known
    if raw is not None:
        if tensor.HasField("contents"):
            raise InvalidField(
                f"`{tensor.name}` has `contents` besides `raw_input_contents`", field=tensor.name
            )
    elif tensor.datatype == "BYTES":
        data = _decode_texts(tensor.name, tensor.contents.bytes_contents)
    elif tensor.datatype in CONTENTS:
        data = list(getattr(tensor.contents, CONTENTS[tensor.datatype]))
    if raw is not None:
        binary.append(raw)
        parameters[SIZE_PARAMETER] = len(raw)
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "datatype": tensor.datatype,
        "parameters": parameters,
        "data": data,
    }


def _decode_texts(name: str, texts: Sequence[bytes]) -> list[str]:
    decoded: list[str] = []
    try:
        decoded.extend(text.decode() for text in texts)
    except UnicodeDecodeError as exc:
        path = f"{name}[{len(decoded)}]"
        raise InvalidField(f"`{path}` is not UTF-8", field=path) from exc
    return decoded


def _convert_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _convert_parameter(name, value) for name, value in parameters.items()}


def _convert_parameter(name: str, parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise InvalidField(f"parameter `{name}` has no value", field=name)
    return getattr(parameter, choice)


def fill_outputs(response: Any, outputs: Sequence[Tensor]) -> None:
    """Add tensors to a ModelInferResponse, as raw bytes."""
    for tensor in outputs:
        output = response.outputs.add(
            name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
        )
        if tensor.content_type is not None:
            output.parameters["content_type"].string_param = tensor.content_type
        response.raw_output_contents.append(bytes(tensor.to_binary()))
