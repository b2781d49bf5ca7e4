"""KV caches for ONNX Runtime, on the host and on a device, and the transfer of inputs and outputs.

ONNX Runtime has no function that copies device memory. DeviceKvCache therefore runs a graph with
one Identity node, bound to source and target. The graph copies whole slots, because the contents
after the valid tokens do not matter.

ONNX Runtime copies a host array to the device only once, when the array is bound (onnxruntime issue
5857). Values that change between calls therefore have a buffer on the device.
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

_DTYPES: Mapping[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
}


@dataclass(frozen=True, slots=True)
class KvCacheLayout:
    """Two arrays per layer with attention, keys and values: [slots, heads, tokens, size]."""

    names: tuple[str, ...]  # a name per array, such as "0.key"
    shapes: tuple[tuple[int, int, int, int], ...]  # of each array
    dtype: np.dtype[np.generic]
    logits_dtype: np.dtype[np.generic]

    @classmethod
    def of(cls, session: ort.InferenceSession, spec: DecoderSpec, slots: int, context: int) -> Self:
        """Return the layout of `slots` slots of `context` tokens, with the types of the graph."""
        config = spec.generation_config
        types = {output.name: _parse_dtype(output) for output in session.get_outputs()}
        sizes = {given.name: given.shape for given in session.get_inputs()}
        names = tuple(f"{layer}.{name}" for layer in range(config.layers) for name in KV_NAMES)
        shapes = []
        for name in names:
            _, heads, _, size = sizes[f"past_key_values.{name}"]
            # onnxruntime-genai's model builder names the head size instead of stating it.
            stated = isinstance(heads, int) and isinstance(size, int)
            kv_heads, head_dim = (heads, size) if stated else (config.kv_heads, config.head_dim)
            shapes.append((slots, kv_heads, context, head_dim))
        return cls(
            names,
            tuple(shapes),
            dtype=types[f"present.{names[0]}"] if names else np.dtype(np.float32),
            logits_dtype=types["logits"],
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of all arrays, for a model whose layers have equal heads."""
        assert len(set(self.shapes)) == 1, "bug: arrays of different shapes"
        return self.shapes[0]


def _parse_dtype(output: ort.NodeArg) -> np.dtype[np.generic]:
    if output.type not in _DTYPES:
        raise EngineFailed(
            f"the output `{output.name}` has type {output.type}; supported are {', '.join(_DTYPES)}"
        )
    return np.dtype(_DTYPES[output.type])


# Copies an input from the host to the device, before a call.
SendInput = Callable[[], object]
# Returns an output on the host, after a call. The next call may overwrite it.
ReceiveOutput = Callable[[], NDArray[np.generic]]


class IoBuffer(Protocol):
    """Buffer of an input or output. Calls bind its first rows, so they share its memory."""

    # On the host, the memory of the buffer. On a device, what the function of `bind_input` copies.
    values: NDArray[np.generic]

    def bind_input(self, binding: ort.IOBinding, name: str, rows: int) -> SendInput:
        """Bind the first rows as an input. The returned function copies them to the device."""
        ...

    def bind_output(self, binding: ort.IOBinding, name: str, rows: int) -> ReceiveOutput:
        """Bind the first rows as an output."""
        ...


class KvCache(Protocol):
    """The KV cache of one decoder, which also allocates the buffers of its calls."""

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        """Bind slots `first` to `end` - 1 as inputs and outputs of a call, in place."""
        ...

    def create_buffer(self, values: NDArray[np.generic]) -> IoBuffer:
        """Return a buffer with the shape and type of `values`, on the host `values` itself."""
        ...

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of slot `source` to slot `target`."""
        ...

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Swap the first `tokens` tokens of two slots."""
        ...


class HostKvCache:
    """KV cache in host memory.

    The operating system allocates zeroed pages on the first write, so unused slots take no memory.
    """

    def __init__(self, layout: KvCacheLayout) -> None:
        self.names = layout.names
        self.arrays: list[NDArray[np.generic]] = [
            np.zeros(shape, layout.dtype) for shape in layout.shapes
        ]

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        for name, array in zip(self.names, self.arrays, strict=True):
            bind_array(binding, array[first:end], f"past_key_values.{name}", f"present.{name}")

    def create_buffer(self, values: NDArray[np.generic]) -> IoBuffer:
        return _HostBuffer(values)

    def copy(self, source: int, target: int, tokens: int) -> None:
        copy_slot(self.arrays, source, target, tokens)

    def swap(self, first: int, second: int, tokens: int) -> None:
        swap_slots(self.arrays, first, second, tokens)


class _HostBuffer:
    def __init__(self, values: NDArray[np.generic]) -> None:
        self.values = values

    def bind_input(self, binding: ort.IOBinding, name: str, rows: int) -> SendInput:
        bind_array(binding, self.values[:rows], name)
        return _send_nothing

    def bind_output(self, binding: ort.IOBinding, name: str, rows: int) -> ReceiveOutput:
        values = self.values[:rows]
        binding.bind_output(name, *_describe_array(values))
        return lambda: values


def bind_array(
    binding: ort.IOBinding,
    array: NDArray[np.generic],
    input_name: str,
    output_name: str | None = None,
) -> None:
    """Bind a host array as an input, and as an output if `output_name` is given."""
    binding.bind_input(input_name, *_describe_array(array))
    if output_name is not None:
        binding.bind_output(output_name, *_describe_array(array))


def _describe_array(array: NDArray[np.generic]) -> tuple[object, ...]:
    return "cpu", 0, array.dtype.type, array.shape, array.ctypes.data


def _send_nothing() -> None:
    """Do nothing: on the host a call reads the bound array itself."""


def copy_slot(arrays: Sequence[NDArray[np.generic]], source: int, target: int, tokens: int) -> None:
    """Copy the first `tokens` tokens of a slot in each array [slots, heads, tokens, size]."""
    for array in arrays:
        array[target, :, :tokens] = array[source, :, :tokens]


def swap_slots(arrays: Sequence[NDArray[np.generic]], first: int, second: int, tokens: int) -> None:
    """Swap the first `tokens` tokens of two slots, one array at a time to save memory."""
    for array in arrays:
        saved = array[first, :, :tokens].copy()
        array[first, :, :tokens] = array[second, :, :tokens]
        array[second, :, :tokens] = saved


_ONNX_DTYPES = {np.dtype(np.float16): 10, np.dtype(np.float32): 1}  # codes of onnx.TensorProto


class DeviceKvCache:
    """KV cache on `device`, an ONNX Runtime device type such as "cuda".

    The memory of the cache belongs to the session and is released with the session. OrtValues
    without a session are in an arena of the process, which does not release their memory.
    """

    def __init__(
        self, layout: KvCacheLayout, session: ort.InferenceSession, device: str, provider: str
    ) -> None:
        self._layout = layout
        self._session = session
        self._device = device
        dtype = layout.dtype.type
        self._arrays = [self._allocate(layout.shape, dtype) for _ in layout.names]
        self._slot_shape = (1, *layout.shape[1:])
        self._spare = self._allocate(self._slot_shape, dtype)
        self._slot_bytes = math.prod(self._slot_shape) * layout.dtype.itemsize
        self._copier = _open_copier(layout.dtype, self._slot_shape, provider)

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        shape = (end - first, *self._layout.shape[1:])
        for name, array in zip(self._layout.names, self._arrays, strict=True):
            memory = self._describe(shape, self._slot_address(array, first))
            binding.bind_input(f"past_key_values.{name}", *memory)
            binding.bind_output(f"present.{name}", *memory)

    def create_buffer(self, values: NDArray[np.generic]) -> IoBuffer:
        memory = self._allocate(values.shape, values.dtype.type)
        return _DeviceBuffer(values, memory, self._session, self._device)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy a whole slot, not only its first `tokens` tokens."""
        for array in self._arrays:
            self._copy(self._slot_address(array, source), self._slot_address(array, target))

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Swap two whole slots, not only their first `tokens` tokens."""
        spare = self._spare.data_ptr()
        for array in self._arrays:
            self._copy(self._slot_address(array, first), spare)
            self._copy(self._slot_address(array, second), self._slot_address(array, first))
            self._copy(spare, self._slot_address(array, second))

    def _allocate(self, shape: tuple[int, ...], dtype: type[np.generic]) -> ort.OrtValue:
        return self._session.create_ortvalue_from_shape_and_type(shape, dtype, self._device)

    def _slot_address(self, array: ort.OrtValue, slot: int) -> int:
        address: int = array.data_ptr() + slot * self._slot_bytes
        return address

    def _copy(self, source: int, target: int) -> None:
        binding = self._copier.io_binding()
        binding.bind_input("from", *self._describe(self._slot_shape, source))
        binding.bind_output("to", *self._describe(self._slot_shape, target))
        self._copier.run_with_iobinding(binding)

    def _describe(self, shape: tuple[int, ...], address: int) -> tuple[object, ...]:
        return self._device, 0, self._layout.dtype.type, shape, address


class _DeviceBuffer:
    def __init__(
        self,
        values: NDArray[np.generic],
        memory: ort.OrtValue,
        session: ort.InferenceSession,
        device: str,
    ) -> None:
        self.values = values
        self._memory = memory
        self._session = session
        self._device = device

    def bind_input(self, binding: ort.IOBinding, name: str, rows: int) -> SendInput:
        view = self._view(rows)
        binding.bind_ortvalue_input(name, view)
        return partial(view.update_inplace, self.values[:rows])

    def bind_output(self, binding: ort.IOBinding, name: str, rows: int) -> ReceiveOutput:
        view = self._view(rows)
        binding.bind_ortvalue_output(name, view)
        return lambda: np.asarray(view.numpy())

    def _view(self, rows: int) -> ort.OrtValue:
        """Return the first rows as an OrtValue, which does not own the memory.

        ONNX Runtime creates such a value only as a bound output. This binding never runs, so any
        output serves, whatever its type.
        """
        values, binding = self.values[:rows], self._session.io_binding()
        output = self._session.get_outputs()[0].name
        place = self._device, 0, values.dtype.type, values.shape, self._memory.data_ptr()
        binding.bind_output(output, *place)
        return binding.get_outputs()[0]


def _open_copier(
    dtype: np.dtype[np.generic], shape: tuple[int, ...], provider: str
) -> ort.InferenceSession:
    """Open a session of one Identity node. Needs `onnx`, which the extra `gpu` installs."""
    from onnx import helper

    values = [
        helper.make_tensor_value_info(name, _ONNX_DTYPES[dtype], shape) for name in ("from", "to")
    ]
    node = helper.make_node("Identity", ["from"], ["to"])
    graph = helper.make_graph([node], "copy", values[:1], values[1:])
    opset = helper.make_opsetid("", 20)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=[provider])
