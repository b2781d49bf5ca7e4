"""Rows of keys and values in the memory of a device, and what goes there and back.

ONNX Runtime has no call that copies device memory, but a graph of one Identity does, bound to where
it reads and where it writes. Whole slots are copied: what lies beyond their tokens is noise anyway.

An array of the host that is bound for a device is copied when it is bound, and never again
(onnxruntime issue 5857), so what changes between calls has a place on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deployments.engines.decoder import KV_NAMES, DecoderSpec
from deployments.errors import EngineFailed

_TYPES: Mapping[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
}


@dataclass(frozen=True, slots=True)
class KvCacheLayout:
    """Two arrays for each layer, keys and values: [slots, heads, tokens, size]."""

    names: tuple[str, ...]  # of the arrays, such as "0.key"
    shape: tuple[int, int, int, int]  # of each
    dtype: np.dtype[np.generic]
    answers: np.dtype[np.generic]  # of logits

    @classmethod
    def of(cls, session: ort.InferenceSession, spec: DecoderSpec, slots: int, context: int) -> Self:
        """The layout of `slots` slots of `context` tokens, in the types of the graph."""
        types = {output.name: _dtype(output) for output in session.get_outputs()}
        names = tuple(
            f"{i}.{part}" for i in range(spec.generation_config.layers) for part in KV_NAMES
        )
        return cls(
            names,
            (slots, spec.generation_config.kv_heads, context, spec.generation_config.head_dim),
            dtype=types[f"present.{names[0]}"],
            answers=types["logits"],
        )


def _dtype(output: ort.NodeArg) -> np.dtype[np.generic]:
    if output.type not in _TYPES:
        raise EngineFailed(f"`{output.name}` is a {output.type}, which no slot of memory has")
    return np.dtype(_TYPES[output.type])


# Done before, or after, each call.
Transfer = Callable[[], object]


class RowMemory(Protocol):
    """The memory of one decoder, and of what goes in and out of its calls."""

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        """Let a call read and write the slots from `first` up to `end`, where they lie."""
        ...

    def bind_input(self, binding: ort.IOBinding, name: str, values: NDArray[np.int64]) -> Transfer:
        """Let a call read values of the host: what brings them to where it reads."""
        ...

    def bind_output(
        self, binding: ort.IOBinding, name: str, values: NDArray[np.generic]
    ) -> Transfer:
        """Let a call answer into an array of the host: what brings the answer there."""
        ...

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Make the first `tokens` of slot `target` those of slot `source`."""
        ...

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Swap the first `tokens` of two slots."""
        ...


class HostKvCache:
    """Rows in the memory of the machine.

    Zeroed pages cost nothing until they are written, so slots that were never used are free.
    """

    def __init__(self, layout: KvCacheLayout) -> None:
        self.names = layout.names
        self.arrays: list[NDArray[np.generic]] = [
            np.zeros(layout.shape, layout.dtype) for _ in layout.names
        ]

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        """Let a call read and write the slots from `first` up to `end`."""
        for name, array in zip(self.names, self.arrays, strict=True):
            bind_array(binding, array[first:end], f"past_key_values.{name}", f"present.{name}")

    def bind_input(self, binding: ort.IOBinding, name: str, values: NDArray[np.int64]) -> Transfer:
        """Read the values where they are."""
        bind_array(binding, values, name)
        return _nothing

    def bind_output(
        self, binding: ort.IOBinding, name: str, values: NDArray[np.generic]
    ) -> Transfer:
        """Write the answer where it is wanted."""
        binding.bind_output(name, *_place(values))
        return _nothing

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy a slot."""
        copy_slot(self.arrays, source, target, tokens)

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Swap two slots."""
        swap_slots(self.arrays, first, second, tokens)


def bind_array(
    binding: ort.IOBinding, slots: NDArray[np.generic], into: str, out_of: str | None = None
) -> None:
    """Bind an array of the host as an input, and as an output where one is named."""
    binding.bind_input(into, *_place(slots))
    if out_of is not None:
        binding.bind_output(out_of, *_place(slots))


def _place(values: NDArray[np.generic]) -> tuple[object, ...]:
    return "cpu", 0, values.dtype.type, values.shape, values.ctypes.data


def _nothing() -> None:
    """There is nothing to bring: on the host a call works where the arrays are."""


def copy_slot(arrays: Sequence[NDArray[np.generic]], source: int, target: int, tokens: int) -> None:
    """Copy the first `tokens` of a slot, in all of several [slots, heads, tokens, size]."""
    for array in arrays:
        array[target, :, :tokens] = array[source, :, :tokens]


def swap_slots(arrays: Sequence[NDArray[np.generic]], first: int, second: int, tokens: int) -> None:
    """Swap the first `tokens` of two slots, in one after the other of several arrays."""
    for array in arrays:
        kept = array[first, :, :tokens].copy()
        array[first, :, :tokens] = array[second, :, :tokens]
        array[second, :, :tokens] = kept


_ONNX_TYPES = {np.dtype(np.float16): 10, np.dtype(np.float32): 1}  # of onnx.TensorProto


class DeviceKvCache:
    """Rows on `device`, an ONNX Runtime device type such as "cuda"."""

    def __init__(self, layout: KvCacheLayout, device: str, provider: str) -> None:
        self._layout = layout
        self._device = device
        dtype = layout.dtype.type
        self._arrays = [
            ort.OrtValue.ortvalue_from_shape_and_type(layout.shape, dtype, device, 0)
            for _ in layout.names
        ]
        one_slot = (1, *layout.shape[1:])
        self._spare = ort.OrtValue.ortvalue_from_shape_and_type(one_slot, dtype, device, 0)
        self._slot_bytes = math.prod(one_slot) * layout.dtype.itemsize
        self._copier = _copier(layout, provider)

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        """Let a call read and write the slots from `first` up to `end`."""
        shape = (end - first, *self._layout.shape[1:])
        for name, array in zip(self._layout.names, self._arrays, strict=True):
            place = self._place(shape, array.data_ptr() + first * self._slot_bytes)
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
        """Copy a slot."""
        for array in self._arrays:
            self._move(self._slot_address(array, source), self._slot_address(array, target))

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Swap two slots, an array at a time."""
        spare = self._spare.data_ptr()
        for array in self._arrays:
            self._move(self._slot_address(array, first), spare)
            self._move(self._slot_address(array, second), self._slot_address(array, first))
            self._move(spare, self._slot_address(array, second))

    def _slot_address(self, array: ort.OrtValue, slot: int) -> int:
        address: int = array.data_ptr() + slot * self._slot_bytes
        return address

    def _move(self, source: int, target: int) -> None:
        shape = (1, *self._layout.shape[1:])
        binding = self._copier.io_binding()
        binding.bind_input("from", *self._place(shape, source))
        binding.bind_output("to", *self._place(shape, target))
        self._copier.run_with_iobinding(binding)

    def _place(self, shape: tuple[int, ...], address: int) -> tuple[object, ...]:
        return self._device, 0, self._layout.dtype.type, shape, address


def _copier(layout: KvCacheLayout, provider: str) -> ort.InferenceSession:
    """A session of one Identity over a slot. The package `onnx` comes with the extra for GPUs."""
    from onnx import helper

    shape = (1, *layout.shape[1:])
    values = [
        helper.make_tensor_value_info(name, _ONNX_TYPES[layout.dtype], shape)
        for name in ("from", "to")
    ]
    node = helper.make_node("Identity", ["from"], ["to"])
    graph = helper.make_graph([node], "copy", values[:1], values[1:])
    opset = helper.make_opsetid("", 20)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=[provider])
