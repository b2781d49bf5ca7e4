"""Tensors as the Open Inference Protocol writes them: values in JSON, or bytes behind it."""

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

# What lies on the wire; numpy has no BF16, whose 16 bits are the upper half of an FP32.
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
# The Python types JSON values of each kind of number may have.
JSON_TYPES: Mapping[str, frozenset[type]] = {
    "b": frozenset({bool}),
    "i": frozenset({int}),
    "u": frozenset({int}),
    "f": frozenset({int, float}),
}
ELEMENT_LENGTH = struct.Struct("<I")  # in front of every element of a binary BYTES tensor


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output; as many values as `shape` says, last dimension fastest.

    BYTES hold texts, everything else numbers. `content_type` is the word by which MLServer's
    clients know what is inside the texts.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    values: Values
    content_type: str | None = None

    def to_json(self) -> Any:
        """`data`: a flat list, or an array that the JSON encoder writes as one."""
        return self.values.reshape(-1) if isinstance(self.values, np.ndarray) else self.values

    def to_binary(self) -> bytes | memoryview:
        """The raw tensor: the array's own memory where that is what the wire wants."""
        if isinstance(self.values, np.ndarray):
            raw = np.ascontiguousarray(self.values, NUMPY_TYPES[self.datatype])
            return raw.reshape(-1).view(np.uint8).data
        encoded = [text.encode() for text in self.values]
        return b"".join(part for one in encoded for part in (ELEMENT_LENGTH.pack(len(one)), one))


def parse_json_tensor(
    name: str, datatype: Datatype, shape: Sequence[int], data: list[Any]
) -> Tensor:
    """A tensor from `data`, flat or nested as `shape` says. Raises InvalidField."""
    values = _flat(name, shape, data)
    if datatype == "BYTES":
        wrong = next((i for i, value in enumerate(values) if not isinstance(value, str)), None)
        if wrong is not None:
            raise _tensor_error(
                f"{name}[{wrong}]", "must be a string; send other bytes as binary data"
            )
        return Tensor(name, datatype, tuple(shape), values)
    if datatype == "BF16":
        raise _tensor_error(name, "is BF16, which JSON cannot hold; send it as binary data")
    return Tensor(name, datatype, tuple(shape), _numbers(name, NUMPY_TYPES[datatype], values))


def parse_binary_tensor(
    name: str, datatype: Datatype, shape: Sequence[int], raw: memoryview
) -> Tensor:
    """A tensor from its raw bytes, all of them and no more. Raises InvalidField."""
    count = math.prod(shape)
    if datatype == "BYTES":
        return Tensor(name, datatype, tuple(shape), _texts(name, count, raw))
    kind = NUMPY_TYPES[datatype]
    if len(raw) != count * kind.itemsize:
        due = f"{count} values of {datatype} are {count * kind.itemsize} bytes"
        raise _tensor_error(name, f"has {len(raw)} bytes; {due}")
    values = np.frombuffer(raw, kind)
    if datatype == "BF16":
        values = (values.astype("<u4") << 16).view("<f4")
    return Tensor(name, datatype, tuple(shape), values)


def _flat(name: str, shape: Sequence[int], data: list[Any]) -> list[Any]:
    """The values of a flat or nested list that has exactly the dimensions of `shape`."""
    count = math.prod(shape)
    nested = bool(data) and isinstance(data[0], list)
    if not nested and len(data) != count:
        raise _tensor_error(name, f"has {len(data)} values; its shape {list(shape)} means {count}")
    level = [data] if nested else [[data]]
    for size in shape if nested else ():
        if any(not isinstance(row, list) or len(row) != size for row in level):
            raise _tensor_error(name, f"is not nested as its shape {list(shape)} says")
        level = [child for row in level for child in row]
    return level if nested else data


def _numbers(name: str, kind: np.dtype[Any], values: list[Any]) -> NDArray[Any]:
    allowed = JSON_TYPES[kind.kind]
    wrong = next((i for i, value in enumerate(values) if type(value) not in allowed), None)
    if wrong is not None:
        words = " or ".join(sorted(one.__name__ for one in allowed))
        raise _tensor_error(f"{name}[{wrong}]", f"must be of type {words}")
    try:
        with np.errstate(over="ignore"):
            numbers = np.array(values, kind)
    except OverflowError as exc:
        raise _tensor_error(name, f"has a value that is too large for {kind.name}") from exc
    # JSON has no infinity, so one comes from a value beyond the type's range.
    if kind.kind == "f" and not np.isfinite(numbers).all():
        raise _tensor_error(name, f"has a value that is too large for {kind.name}")
    return numbers


def _texts(name: str, count: int, raw: memoryview) -> list[str]:
    texts: list[str] = []
    start = 0
    # Counted by what is there, never by the shape alone: that is only a claim.
    while start < len(raw):
        begin = start + ELEMENT_LENGTH.size
        if begin > len(raw):
            raise _tensor_error(f"{name}[{len(texts)}]", "ends within its length")
        end = begin + ELEMENT_LENGTH.unpack_from(raw, start)[0]
        if end > len(raw):
            raise _tensor_error(f"{name}[{len(texts)}]", "is said to be longer than the tensor")
        try:
            texts.append(str(raw[begin:end], "utf-8"))
        except UnicodeDecodeError as exc:
            raise _tensor_error(f"{name}[{len(texts)}]", "is not UTF-8") from exc
        start = end
    if len(texts) != count:
        raise _tensor_error(name, f"has {len(texts)} elements; its shape means {count}")
    return texts


def _tensor_error(path: str, why: str) -> InvalidField:
    return InvalidField(f"`{path}` {why}", field=path)
