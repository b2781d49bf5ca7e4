"""Descriptions and conversion of the messages over gRPC."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc import service_pb2

from deployments.errors import BodyTooLarge, InvalidField, MalformedBody, ServeError
from deployments.grpc_status import INFERENCE_METHODS
from deployments.ingress.apis.open_inference import grpc_messages
from deployments.ingress.apis.open_inference.grpc_messages import (
    MAX_PARTS,
    PREFIX,
    SERVICE_FILE,
    convert_request,
    fill_outputs,
    find_type,
    frame_message,
    inflate_frame,
    parse_message,
)
from deployments.ingress.apis.open_inference.message import read_tensors
from deployments.ingress.apis.open_inference.tensors import Tensor

FOLDER = Path(grpc_messages.__file__).parent


def request(**tensor: Any) -> Any:
    sent = find_type("ModelInferRequest")(model_name="org/model")
    sent.inputs.add(name="x", **tensor)
    return sent


def read(sent: Any) -> dict[str, Tensor]:
    message, binary = convert_request(sent)
    return read_tensors(message.inputs, binary)


def describe(kind: Descriptor) -> dict[str, Any]:
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            None if field.message_type is None else describe(field.message_type),
        )
        for field in kind.fields
    }


@pytest.mark.parametrize("method", INFERENCE_METHODS)
def test_messages_are_those_of_triton(method: str) -> None:
    for name in (f"{method}Request", f"{method}Response"):
        theirs = service_pb2.DESCRIPTOR.message_types_by_name[name]
        assert describe(find_type(name).DESCRIPTOR) == describe(theirs)


def test_description_is_generated_from_its_source(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    sources = [str(FOLDER / name) for name in ("grpc_service.proto", "grpc_health.proto")]
    generated = tmp_path / SERVICE_FILE
    arguments = [f"-I{FOLDER}", f"--descriptor_set_out={generated}", *sources]
    assert protoc.main(["protoc", *arguments]) == 0
    assert generated.read_bytes() == (FOLDER / SERVICE_FILE).read_bytes()


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-1, 300]),
        ("INT32", "int_contents", [-1, 1 << 30]),
        ("INT64", "int64_contents", [-1, 1 << 60]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 65_535]),
        ("UINT32", "uint_contents", [0, 1 << 31]),
        ("UINT64", "uint64_contents", [0, 1 << 63]),
        ("FP32", "fp32_contents", [0.5, -2.0]),
        ("FP64", "fp64_contents", [0.1, -2.0]),
    ],
)
def test_numbers_are_the_same_in_contents_and_raw(
    datatype: str, field: str, values: list[Any]
) -> None:
    in_contents = request(datatype=datatype, shape=[2], contents={field: values})
    tensor = read(in_contents)["x"]
    assert tensor.values.tolist() == values  # type: ignore[union-attr]
    raw = request(datatype=datatype, shape=[2])
    raw.raw_input_contents.append(bytes(tensor.to_binary()))
    assert np.array_equal(read(raw)["x"].values, tensor.values)


def test_texts_are_the_same_in_contents_and_raw() -> None:
    texts = ["é", "", "two words"]
    encoded = [text.encode() for text in texts]
    tensor = read(request(datatype="BYTES", shape=[3], contents={"bytes_contents": encoded}))["x"]
    assert tensor.values == texts
    raw = request(datatype="BYTES", shape=[3])
    raw.raw_input_contents.append(bytes(tensor.to_binary()))
    assert read(raw)["x"].values == texts


def test_parameters_and_outputs_are_converted() -> None:
    sent = request(datatype="BYTES", shape=[1], contents={"bytes_contents": [b"a"]})
    sent.id = "42"
    sent.parameters["flag"].bool_param = False
    sent.parameters["count"].int64_param = 3
    sent.parameters["text"].string_param = ""
    sent.parameters["share"].double_param = 0.5
    sent.parameters["level"].uint64_param = 2
    sent.outputs.add(name="embedding").parameters["classification"].int64_param = 2
    message, _ = convert_request(sent)
    assert message.parameters == {"flag": False, "count": 3, "text": "", "share": 0.5, "level": 2}
    assert message.id == "42"
    assert message.outputs is not None
    assert message.outputs[0].parameters == {"classification": 2}


def bad_requests() -> dict[str, tuple[Any, str]]:
    both = request(datatype="FP32", shape=[1], contents={"fp32_contents": [1.0]})
    both.raw_input_contents.append(b"\0\0\0\0")
    too_few = request(datatype="FP32", shape=[1])
    too_few.inputs.add(name="y", datatype="FP32", shape=[1])
    too_few.raw_input_contents.append(b"\0\0\0\0")
    unset = request(datatype="FP32", shape=[1], contents={"fp32_contents": [1.0]})
    unset.parameters["empty"].SetInParent()
    latin = {"bytes_contents": [b"\xe9"]}
    return {
        "both": (both, "`x` has `contents` besides `raw_input_contents`"),
        "too few": (too_few, "`raw_input_contents` has 1 tensors; `inputs` has 2"),
        "unset": (unset, "parameter `empty` has no value"),
        "not UTF-8": (request(datatype="BYTES", shape=[1], contents=latin), "`x[0]` is not UTF-8"),
        "other field": (
            request(datatype="FP32", shape=[1], contents={"fp64_contents": [1.0]}),
            "`x` has 0 values",
        ),
        "too large": (
            request(datatype="INT8", shape=[1], contents={"int_contents": [300]}),
            "too large for int8",
        ),
        "FP16": (request(datatype="FP16", shape=[1]), "`x` has no data"),
        "unknown type": (request(datatype="FP8", shape=[1]), "datatype"),
        "shared memory": (
            request(
                datatype="BYTES",
                shape=[1],
                parameters={"shared_memory_region": {"string_param": "mine"}},
            ),
            "shared memory is not supported",
        ),
        "negative": (request(datatype="BYTES", shape=[-1]), "shape"),
    }


@pytest.mark.parametrize("name", bad_requests())
def test_invalid_requests_name_the_tensor(name: str) -> None:
    sent, message = bad_requests()[name]
    with pytest.raises(InvalidField) as raised:
        read(sent)
    assert message in raised.value.message


def test_parts_of_a_request_are_limited() -> None:
    sent = find_type("ModelInferRequest")()
    for _ in range(MAX_PARTS + 1):
        sent.inputs.add()
    with pytest.raises(MalformedBody, match=f"more than {MAX_PARTS}"):
        convert_request(sent)
    sent = request(datatype="BYTES", shape=[1])
    for number in range(MAX_PARTS):
        sent.inputs[0].parameters[str(number)].bool_param = True
    with pytest.raises(MalformedBody, match=f"more than {MAX_PARTS}"):
        convert_request(sent)


def test_outputs_are_raw_bytes() -> None:
    response = find_type("ModelInferResponse")()
    numbers = Tensor("score", "FP32", (1, 2), np.array([[1, 2]], np.float32))
    fill_outputs(response, [numbers, Tensor("output", "BYTES", (1, 1), ["é"], "json")])
    assert [each.name for each in response.outputs] == ["score", "output"]
    assert list(response.outputs[0].shape) == [1, 2]
    assert response.outputs[1].parameters["content_type"].string_param == "json"
    assert response.raw_output_contents[0] == np.array([1, 2], "<f4").tobytes()
    assert response.raw_output_contents[1] == b"\x02\0\0\0\xc3\xa9"


def test_message_may_be_compressed_within_the_limit() -> None:
    message = request(datatype="BYTES", shape=[1], contents={"bytes_contents": [b"a" * 1_000]})
    plain = frame_message(message)
    assert parse_message("ModelInferRequest", inflate_frame(plain, "", 2_000)) == message
    packed = gzip.compress(message.SerializeToString())
    framed = PREFIX.pack(1, len(packed)) + packed
    assert inflate_frame(framed, "gzip", 2_000) == plain
    with pytest.raises(BodyTooLarge):
        inflate_frame(framed, "gzip", 999)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\0\0\0",
        PREFIX.pack(0, 2) + b"x",
        PREFIX.pack(0, 0) * 2,
        PREFIX.pack(0, 1) + b"\xff",
        PREFIX.pack(1, 1) + b"x",
        PREFIX.pack(2, 1) + b"x",
    ],
    ids=[
        *("empty", "short prefix", "short message", "two messages", "no protobuf"),
        *("compressed without an encoding", "unknown flag"),
    ],
)
def test_body_has_one_message(body: bytes) -> None:
    with pytest.raises(MalformedBody):
        parse_message("ModelInferRequest", inflate_frame(body, "", 100))


def test_unknown_compression_is_refused() -> None:
    with pytest.raises(ServeError, match="`grpc-encoding` is not supported"):
        inflate_frame(PREFIX.pack(1, 1) + b"x", "snappy", 100)
