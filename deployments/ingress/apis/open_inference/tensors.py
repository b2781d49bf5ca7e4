"""Tensors of the Open Inference Protocol: values in JSON, or raw bytes after the JSON."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deployments.errors import InvalidField

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
]
Values = NDArray[Any] | Sequence[str]

# Wire formats. numpy has no BF16, whose 16 bits are the upper half of an FP32.
NUMPY_TYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
# Python types of JSON values, by kind of numpy dtype.
JSON_TYPES: Mapping[str, frozenset[type]] = {
    "b": frozenset({bool}),
    "i": frozenset({int}),
    "u": frozenset({int}),
    "f": frozenset({int, float}),
}
ELEMENT_LENGTH = struct.Struct("<I")  # precedes each element of a binary BYTES tensor


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output in row-major order.

    The values are texts for BYTES, an array for other datatypes. `content_type` is MLServer's type
    of the texts.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    values: Values
    content_type: str | None = None

    def to_json(self) -> Any:
        """Return the values as a flat list or array. The JSON encoder accepts both."""
        return self.values.reshape(-1) if isinstance(self.values, np.ndarray) else self.values

    def to_binary(self) -> bytes | memoryview:
        """Return the raw tensor, without a copy if a contiguous array has the wire format."""
        if isinstance(self.values, np.ndarray):
            raw = np.ascontiguousarray(self.values, NUMPY_TYPES[self.datatype])
            return raw.reshape(-1).view(np.uint8).data
        encoded = [text.encode() for text in self.values]
        return b"".join(ELEMENT_LENGTH.pack(len(text)) + text for text in encoded)


def parse_json_tensor(
    name: str, datatype: Datatype, shape: Sequence[int], data: list[Any]
) -> Tensor:
    """Parse `data`, flat or nested according to `shape`. Raises InvalidField."""
    values = _flat(name, shape, data)
    if datatype == "BYTES":
        wrong = next((i for i, value in enumerate(values) if not isinstance(value, str)), None)
        if wrong is not None:
            raise _tensor_error(
                f"{name}[{wrong}]", "must be a string. Send other bytes as binary data."
            )
        return Tensor(name, datatype, tuple(shape), values)
    if datatype == "BF16":
        raise _tensor_error(name, "is BF16, which JSON does not support. Send it as binary data.")
    return Tensor(name, datatype, tuple(shape), _numbers(name, NUMPY_TYPES[datatype], values))


def parse_binary_tensor(
    name: str, datatype: Datatype, shape: Sequence[int], raw: memoryview
) -> Tensor:
    """Parse raw bytes. Raises InvalidField if they do not fit the shape and the datatype."""
    count = math.prod(shape)
    if datatype == "BYTES":
        return Tensor(name, datatype, tuple(shape), _texts(name, count, raw))
    kind = NUMPY_TYPES[datatype]
    if len(raw) != count * kind.itemsize:
        expected = f"{count} values of {datatype} have {count * kind.itemsize} bytes"
        raise _tensor_error(name, f"has {len(raw)} bytes; {expected}")
    values = np.frombuffer(raw, kind)
    if datatype == "BF16":
        values = (values.astype("<u4") << 16).view("<f4")
    return Tensor(name, datatype, tuple(shape), values)


def _flat(name: str, shape: Sequence[int], data: list[Any]) -> list[Any]:
    """Return the values of a list that is flat, or nested according to `shape`.

    Raises InvalidField if the list does not fit `shape`.
    """
    count = math.prod(shape)
    nested = bool(data) and isinstance(data[0], list)
    if not nested and len(data) != count:
        raise _tensor_error(name, f"has {len(data)} values; its shape {list(shape)} has {count}")
    level = [data] if nested else [[data]]
    for size in shape if nested else ():
        if any(not isinstance(row, list) or len(row) != size for row in level):
            raise _tensor_error(name, f"is not nested according to its shape {list(shape)}")
        level = [child for row in level for child in row]
    return level if nested else data


def _numbers(name: str, kind: np.dtype[Any], values: list[Any]) -> NDArray[Any]:
    allowed = JSON_TYPES[kind.kind]
    wrong = next((i for i, value in enumerate(values) if type(value) not in allowed), None)
    if wrong is not None:
        names = " or ".join(sorted(allowed_type.__name__ for allowed_type in allowed))
        raise _tensor_error(f"{name}[{wrong}]", f"must be of type {names}")
    try:
        with np.errstate(over="ignore"):
            numbers = np.array(values, kind)
    except OverflowError as exc:
        raise _tensor_error(name, f"has a value that is too large for {kind.name}") from exc
    # JSON has no infinity, so there an infinite value is a number beyond the range of the type.
    if kind.kind == "f" and not np.isfinite(numbers).all():
        raise _tensor_error(name, f"has a value that is not finite as {kind.name}")
    return numbers


def _texts(name: str, count: int, raw: memoryview) -> list[str]:
    texts: list[str] = []
    start = 0
    # Read elements until the bytes end. The shape is not trusted: a client may send a huge one.
    while start < len(raw):
        begin = start + ELEMENT_LENGTH.size
        if begin > len(raw):
            raise _tensor_error(f"{name}[{len(texts)}]", "ends within its length")
        end = begin + ELEMENT_LENGTH.unpack_from(raw, start)[0]
        if end > len(raw):
            raise _tensor_error(
                f"{name}[{len(texts)}]", "has a length beyond the end of the tensor"
            )
        try:
            texts.append(str(raw[begin:end], "utf-8"))
        except UnicodeDecodeError as exc:
            raise _tensor_error(f"{name}[{len(texts)}]", "is not UTF-8") from exc
        start = end
    if len(texts) != count:
        raise _tensor_error(name, f"has {len(texts)} elements; its shape has {count}")
    return texts


def _tensor_error(path: str, problem: str) -> InvalidField:
    return InvalidField(f"`{path}` {problem}", field=path)
