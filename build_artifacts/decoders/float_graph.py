"""A float graph of a decoder by who makes and who reads its values, and its weights to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx

Floats = NDArray[np.float32]


class FloatGraph:
    """The graph of a model in memory, weights and all."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._tables = {table.name: table for table in model.graph.initializer}
        self._makers = {name: node for node in model.graph.node for name in node.output if name}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in filter(None, set(node.input)):
                self._readers.setdefault(name, []).append(node)
        self._answers = {output.name for output in model.graph.output}

    def maker(self, value: str) -> onnx.NodeProto | None:
        """The operator that puts it out; None for inputs and tables."""
        return self._makers.get(value)

    def readers(self, value: str) -> Sequence[onnx.NodeProto]:
        """The operators that read it."""
        return self._readers.get(value, ())

    def reads(self, name: str) -> int:
        """How often a value or a table is read; what the graph answers is read once more."""
        read = sum(list(node.input).count(name) for node in self.readers(name))
        return read + (name in self._answers)

    def has_own(self, tables: Sequence[str]) -> bool:
        """Whether all of them are known, and read once."""
        return all(name in self._tables and self.reads(name) == 1 for name in tables)

    def table(self, name: str) -> Floats:
        """Weights, to look at."""
        import onnx

        values: Floats = onnx.numpy_helper.to_array(self._tables[name])
        return values

    def store(self, name: str, values: Floats) -> None:
        """Change weights."""
        import onnx

        changed = np.ascontiguousarray(values, np.float32)
        self._tables[name].CopyFrom(onnx.numpy_helper.from_array(changed, name))

    def columns_of(self, value: str) -> tuple[str, ...]:
        """The weights [K, N], and the bias [N], of the product that `value` is, and nobody else's.

        Empty where it is none, or where something else reads the value or the tables too.
        """
        maker = self.maker(value)
        if maker is None or self.reads(value) != 1:
            return ()
        if maker.op_type == "Add" and self.has_own(maker.input[1:]):
            weights = self.columns_of(maker.input[0])
            return (*weights, maker.input[1]) if weights else ()
        is_own = maker.op_type == "MatMul" and self.has_own(maker.input[1:])
        return (maker.input[1],) if is_own else ()

    def scale_columns(self, tables: Sequence[str], first: int, factors: Floats) -> None:
        """Multiply the channels from `first` on, which are the last axis of every table."""
        for name in tables:
            values = self.table(name).copy()
            values[..., first : first + len(factors)] *= factors
            self.store(name, values)
