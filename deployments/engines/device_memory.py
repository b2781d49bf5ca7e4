"""Rows of keys and values in the memory of a device, and what goes there and back.

ONNX Runtime has no call that copies device memory, but a graph of one Identity does, bound to where
it reads and where it writes. Whole rows are copied: what lies beyond their tokens is noise anyway.

An array of the host that is bound for a device is copied when it is bound, and never again
(onnxruntime issue 5857), so what changes between calls has a place on the device.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deployments.engines.row_memory import MemoryLayout, Transfer

_TYPES = {np.dtype(np.float16): 10, np.dtype(np.float32): 1}  # of onnx.TensorProto


class DeviceMemory:
    """Rows on `device`, an ONNX Runtime device type such as "cuda"."""

    def __init__(self, layout: MemoryLayout, device: str, provider: str) -> None:
        self._layout = layout
        self._device = device
        dtype = layout.dtype.type
        self._arrays = [
            ort.OrtValue.ortvalue_from_shape_and_type(layout.shape, dtype, device, 0)
            for _ in layout.names
        ]
        one_row = (1, *layout.shape[1:])
        self._spare = ort.OrtValue.ortvalue_from_shape_and_type(one_row, dtype, device, 0)
        self._row_bytes = math.prod(one_row) * layout.dtype.itemsize
        self._copier = _copier(layout, provider)

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        """Let a call read and write the rows from `first` up to `end`."""
        shape = (end - first, *self._layout.shape[1:])
        for name, array in zip(self._layout.names, self._arrays, strict=True):
            place = self._place(shape, array.data_ptr() + first * self._row_bytes)
            binding.bind_input(f"past_key_values.{name}", *place)
            binding.bind_output(f"present.{name}", *place)

    def bind_input(self, binding: ort.IOBinding, name: str, values: NDArray[np.int64]) -> Transfer:
        """Read the values from a place on the device."""
        # Of a copy: where the device is the host, the place would be the array itself.
        place = ort.OrtValue.ortvalue_from_numpy(values.copy(), self._device)
        binding.bind_ortvalue_input(name, place)
        return partial(place.update_inplace, values)

    def bind_output(
        self, binding: ort.IOBinding, name: str, values: NDArray[np.generic]
    ) -> Transfer:
        """Write the answer to a place on the device."""
        place = ort.OrtValue.ortvalue_from_shape_and_type(
            values.shape, values.dtype.type, self._device
        )
        binding.bind_ortvalue_output(name, place)
        return lambda: np.copyto(values, place.numpy())

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy a row."""
        for array in self._arrays:
            self._move(self._row(array, source), self._row(array, target))

    def exchange(self, first: int, second: int, tokens: int) -> None:
        """Swap two rows, an array at a time."""
        spare = self._spare.data_ptr()
        for array in self._arrays:
            self._move(self._row(array, first), spare)
            self._move(self._row(array, second), self._row(array, first))
            self._move(spare, self._row(array, second))

    def _row(self, array: ort.OrtValue, row: int) -> int:
        address: int = array.data_ptr() + row * self._row_bytes
        return address

    def _move(self, source: int, target: int) -> None:
        shape = (1, *self._layout.shape[1:])
        binding = self._copier.io_binding()
        binding.bind_input("from", *self._place(shape, source))
        binding.bind_output("to", *self._place(shape, target))
        self._copier.run_with_iobinding(binding)

    def _place(self, shape: tuple[int, ...], address: int) -> tuple[object, ...]:
        return self._device, 0, self._layout.dtype.type, shape, address


def _copier(layout: MemoryLayout, provider: str) -> ort.InferenceSession:
    """A session of one Identity over a row. The package `onnx` comes with the extra for GPUs."""
    from onnx import helper

    shape = (1, *layout.shape[1:])
    values = [
        helper.make_tensor_value_info(name, _TYPES[layout.dtype], shape) for name in ("from", "to")
    ]
    node = helper.make_node("Identity", ["from"], ["to"])
    graph = helper.make_graph([node], "copy", values[:1], values[1:])
    opset = helper.make_opsetid("", 20)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=[provider])
