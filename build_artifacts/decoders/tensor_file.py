"""Weight file of a new ONNX graph, written one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from build_artifacts.graph_files import find_weight_file

if TYPE_CHECKING:
    import onnx

_MIN_BYTES = 1024  # smaller tensors stay in the graph file
_ALIGNMENT = 64  # of the tensors in bytes, so that a mapped file can be used as it is


class TensorFile:
    """Writer of the tensors of one graph. None stays in memory."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name

    @classmethod
    @contextmanager
    def open(cls, graph: Path) -> Iterator[Self]:
        """Open the weight file of `graph` for the time of the context."""
        path = find_weight_file(graph)
        with path.open("wb") as file:
            yield cls(file, path.name)

    def write(self, name: str, values: NDArray[np.generic]) -> onnx.TensorProto:
        """Write a tensor. Return what the graph file has of it."""
        import onnx

        values = np.asarray(values, order="C")  # unlike ascontiguousarray, also of a scalar
        if values.nbytes < _MIN_BYTES:
            return onnx.numpy_helper.from_array(values, name)
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        place = {"location": self._name, "offset": self._file.tell(), "length": values.nbytes}
        self._file.write(values.reshape(-1).view(np.uint8).data)
        return onnx.TensorProto(
            name=name,
            dims=values.shape,
            data_type=onnx.helper.np_dtype_to_tensor_dtype(values.dtype),
            data_location=onnx.TensorProto.EXTERNAL,
            external_data=[
                onnx.StringStringEntryProto(key=key, value=str(value))
                for key, value in place.items()
            ],
        )
