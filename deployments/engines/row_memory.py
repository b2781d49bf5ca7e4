"""Where a decoder's rows of keys and values lie, and how they get from one row to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deployments.engines.decoder import KEPT, DecoderSpec
from deployments.errors import EngineFailed

_TYPES: Mapping[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
}


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """Two arrays for each layer, keys and values: [rows, heads, tokens, size]."""

    names: tuple[str, ...]  # of the arrays, such as "0.key"
    shape: tuple[int, int, int, int]  # of each
    dtype: np.dtype[np.generic]
    answers: np.dtype[np.generic]  # of logits

    @classmethod
    def of(cls, session: ort.InferenceSession, spec: DecoderSpec, rows: int, context: int) -> Self:
        """The layout of `rows` rows of `context` tokens, in the types of the graph."""
        types = {output.name: _dtype(output) for output in session.get_outputs()}
        names = tuple(f"{i}.{part}" for i in range(spec.decoding.layers) for part in KEPT)
        return cls(
            names,
            (rows, spec.decoding.kv_heads, context, spec.decoding.head_dim),
            dtype=types[f"present.{names[0]}"],
            answers=types["logits"],
        )


def _dtype(output: ort.NodeArg) -> np.dtype[np.generic]:
    if output.type not in _TYPES:
        raise EngineFailed(f"`{output.name}` is a {output.type}, which no row of memory has")
    return np.dtype(_TYPES[output.type])


# Done before, or after, each call.
Transfer = Callable[[], object]


class RowMemory(Protocol):
    """The memory of one decoder, and of what goes in and out of its calls."""

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        """Let a call read and write the rows from `first` up to `end`, where they lie."""
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
        """Make the first `tokens` of row `target` those of row `source`."""
        ...

    def exchange(self, first: int, second: int, tokens: int) -> None:
        """Swap the first `tokens` of two rows."""
        ...


class HostMemory:
    """Rows in the memory of the machine.

    Zeroed pages cost nothing until they are written, so rows that were never used are free.
    """

    def __init__(self, layout: MemoryLayout) -> None:
        self.names = layout.names
        self.arrays: list[NDArray[np.generic]] = [
            np.zeros(layout.shape, layout.dtype) for _ in layout.names
        ]

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        """Let a call read and write the rows from `first` up to `end`."""
        for name, array in zip(self.names, self.arrays, strict=True):
            bind_rows(binding, array[first:end], f"past_key_values.{name}", f"present.{name}")

    def bind_input(self, binding: ort.IOBinding, name: str, values: NDArray[np.int64]) -> Transfer:
        """Read the values where they are."""
        bind_rows(binding, values, name)
        return _nothing

    def bind_output(
        self, binding: ort.IOBinding, name: str, values: NDArray[np.generic]
    ) -> Transfer:
        """Write the answer where it is wanted."""
        binding.bind_output(name, *_place(values))
        return _nothing

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy a row."""
        copy_rows(self.arrays, source, target, tokens)

    def exchange(self, first: int, second: int, tokens: int) -> None:
        """Swap two rows."""
        swap_rows(self.arrays, first, second, tokens)


def bind_rows(
    binding: ort.IOBinding, rows: NDArray[np.generic], into: str, out_of: str | None = None
) -> None:
    """Bind an array of the host as an input, and as an output where one is named."""
    binding.bind_input(into, *_place(rows))
    if out_of is not None:
        binding.bind_output(out_of, *_place(rows))


def _place(values: NDArray[np.generic]) -> tuple[object, ...]:
    return "cpu", 0, values.dtype.type, values.shape, values.ctypes.data


def _nothing() -> None:
    """There is nothing to bring: on the host a call works where the arrays are."""


def copy_rows(arrays: Sequence[NDArray[np.generic]], source: int, target: int, tokens: int) -> None:
    """Copy the first `tokens` of a row, in all of several [rows, heads, tokens, size]."""
    for array in arrays:
        array[target, :, :tokens] = array[source, :, :tokens]


def swap_rows(arrays: Sequence[NDArray[np.generic]], first: int, second: int, tokens: int) -> None:
    """Swap the first `tokens` of two rows, in one after the other of several arrays."""
    for array in arrays:
        kept = array[first, :, :tokens].copy()
        array[first, :, :tokens] = array[second, :, :tokens]
        array[second, :, :tokens] = kept
