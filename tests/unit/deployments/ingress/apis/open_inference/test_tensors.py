from __future__ import annotations

import struct
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from tritonclient.http import InferInput
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

from deployments.errors import InvalidField
from deployments.ingress.apis.open_inference.tensors import (
    NUMPY_TYPES,
    Datatype,
    Tensor,
    parse_binary_tensor,
    parse_json_tensor,
)

NUMBERS = [name for name in NUMPY_TYPES if name != "BF16"]
VALUES = [[0, 1, 1], [1, 0, 1]]
SHAPE = [2, 3]


def build_input(array: np.ndarray, datatype: str, *, binary: bool = True) -> InferInput:
    """Encode an array with the Triton client."""
    sent = InferInput("x", list(array.shape), datatype)
    sent.set_data_from_numpy(array, binary_data=binary)
    return sent


def bytes_tensor(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(e)) + e for e in elements)


@pytest.mark.parametrize("datatype", NUMBERS)
def test_binary_numbers_of_triton_are_parsed(datatype: Datatype) -> None:
    array = np.array(VALUES, triton_to_np_dtype(datatype))
    raw = parse_binary_tensor(
        "x", datatype, SHAPE, memoryview(build_input(array, datatype)._get_binary_data())
    )
    plain = build_input(array, datatype, binary=False)._get_tensor()
    result = parse_json_tensor("x", datatype, SHAPE, plain["data"])
    for tensor in (raw, result):
        values = cast(np.ndarray, tensor.values)
        assert values.dtype == array.dtype
        assert values.tolist() == array.reshape(-1).tolist()


@pytest.mark.parametrize("datatype", NUMBERS)
def test_numbers_are_encoded_for_triton(datatype: Datatype) -> None:
    array = np.array(VALUES, triton_to_np_dtype(datatype))
    raw = Tensor("x", datatype, (2, 3), array).to_binary()
    read = np.frombuffer(raw, dtype=triton_to_np_dtype(datatype)).reshape(2, 3)
    assert read.tolist() == array.tolist()


def test_bf16_is_parsed_from_binary_data_only() -> None:
    array = np.array([1.5, -2.0, 3e38], ml_dtypes.bfloat16)
    raw = memoryview(build_input(array, "BF16")._get_binary_data())
    tensor = parse_binary_tensor("x", "BF16", [3], raw)
    assert cast(np.ndarray, tensor.values).tolist() == array.astype(np.float32).tolist()
    with pytest.raises(InvalidField, match="binary"):
        parse_json_tensor("x", "BF16", [1], [1.5])


TEXTS = ["", "plain", "Zażółć 🦦 中文", "nul \0 inside"]


def test_binary_texts_of_triton_are_parsed() -> None:
    array = np.array([text.encode() for text in TEXTS], object)
    raw = memoryview(build_input(array, "BYTES")._get_binary_data())
    assert parse_binary_tensor("x", "BYTES", [4], raw).values == TEXTS
    plain = build_input(array, "BYTES", binary=False)._get_tensor()["data"]
    assert parse_json_tensor("x", "BYTES", [4], plain).values == TEXTS


def test_texts_are_encoded_for_triton() -> None:
    read = deserialize_bytes_tensor(bytes(Tensor("x", "BYTES", (4,), TEXTS).to_binary()))
    assert [text.decode() for text in read] == TEXTS


def test_arrays_are_encoded_without_a_copy() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = Tensor("x", "FP32", (2, 3), array)
    assert np.shares_memory(np.frombuffer(tensor.to_binary(), np.float32), array)
    assert np.shares_memory(tensor.to_json(), array)


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([2, 2], ["a", "b", "c", "d"]),
        ([2, 2], [["a", "b"], ["c", "d"]]),
        ([4, 1], [["a"], ["b"], ["c"], ["d"]]),
        ([2, 1, 2], [[["a", "b"]], [["c", "d"]]]),
    ],
)
def test_json_data_may_be_flat_or_nested(shape: list[int], data: list[Any]) -> None:
    assert parse_json_tensor("x", "BYTES", shape, data).values == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "path"),
    [
        ("BYTES", [3], ["a", "b"], "x"),
        ("BYTES", [0], ["a"], "x"),
        ("BYTES", [2], [], "x"),
        ("BYTES", [1 << 62, 1 << 62], ["a"], "x"),
        ("BYTES", [2, 2], [["a", "b"], ["c"]], "x"),
        ("BYTES", [2, 2], [["a", "b"], "c"], "x"),
        ("BYTES", [2], [["a"], ["b"]], "x[0]"),
        ("BYTES", [], [["a"]], "x[0]"),
        ("BYTES", [1, 1], [[["a"]]], "x[0]"),
        ("BYTES", [2], ["a", 7], "x[1]"),
        ("BYTES", [2], ["a", None], "x[1]"),
        ("INT32", [2], [1, 2.0], "x[1]"),
        ("INT32", [1], [True], "x[0]"),
        ("INT32", [1], ["1"], "x[0]"),
        ("BOOL", [1], [1], "x[0]"),
        ("INT8", [1], [128], "x"),
        ("UINT8", [1], [-1], "x"),
        ("UINT64", [1], [-1], "x"),
        ("FP16", [1], [70_000], "x"),
        ("FP32", [1], [1e39], "x"),
        ("FP32", [1], [None], "x[0]"),
    ],
)
def test_json_data_that_contradicts_shape_or_type_is_rejected(
    datatype: Datatype, shape: list[int], data: list[Any], path: str
) -> None:
    with pytest.raises(InvalidField) as raised:
        parse_json_tensor("x", datatype, shape, data)
    assert raised.value.field == path


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "path"),
    [
        ("FP32", [2], b"\0" * 7, "x"),
        ("FP32", [2], b"\0" * 12, "x"),
        ("FP32", [1 << 62, 1 << 62], b"\0" * 4, "x"),
        ("BYTES", [1], b"", "x"),
        ("BYTES", [1 << 62], bytes_tensor(b"a"), "x"),
        ("BYTES", [1], bytes_tensor(b"a", b"b"), "x"),
        ("BYTES", [2], bytes_tensor(b"a"), "x"),
        ("BYTES", [2], bytes_tensor(b"a") + b"\1\0\0", "x[1]"),
        ("BYTES", [2], bytes_tensor(b"a") + b"\2\0\0\0b", "x[1]"),
        ("BYTES", [1], b"\xff\xff\xff\xff", "x[0]"),
        ("BYTES", [1], bytes_tensor(b"\xff"), "x[0]"),
        ("BYTES", [1], bytes_tensor(b"\xed\xa0\x80"), "x[0]"),  # lone surrogate
    ],
)
def test_binary_data_of_wrong_size_is_rejected(
    datatype: Datatype, shape: list[int], raw: bytes, path: str
) -> None:
    with pytest.raises(InvalidField) as raised:
        parse_binary_tensor("x", datatype, shape, memoryview(raw))
    assert raised.value.field == path
