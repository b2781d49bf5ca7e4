"""A float graph of a decoder by who makes and who reads its values, and its weights to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx

FloatArray = NDArray[np.float32]

ORT_DOMAIN = "com.microsoft"  # where operators are from that only ONNX Runtime has
ATTENTION = "GroupQueryAttention"


class WeightColumns(NamedTuple):
    """WeightColumns of the weights, and of the bias, of a product."""

    tables: tuple[str, ...]  # empty where they are none of a product of its own
    first: int
    heads: int
    size: int  # of a head


class AttentionWeights(NamedTuple):
    """The products that one attention reads."""

    queries: WeightColumns
    values: WeightColumns

    @classmethod
    def of(cls, graph: FloatGraph, node: onnx.NodeProto) -> Self:
        """Queries, keys and values come side by side from one product, or from one each."""
        queries, values = (
            read_int_attribute(node, "num_heads"),
            read_int_attribute(node, "kv_num_heads"),
        )
        is_packed = not node.input[2]
        query_tables = graph.find_linear_weights(node.input[0])
        value_tables = query_tables if is_packed else graph.find_linear_weights(node.input[2])
        width = graph.table(query_tables[0]).shape[-1] if query_tables else 0
        size = width // (queries + 2 * values if is_packed else queries)
        if value_tables and not query_tables:
            size = graph.table(value_tables[0]).shape[-1] // values
        first = (queries + values) * size if is_packed else 0
        return cls(
            WeightColumns(query_tables, 0, queries, size),
            WeightColumns(value_tables, first, values, size),
        )


def read_int_attribute(node: onnx.NodeProto, attribute: str) -> int:
    """An attribute that is a whole number; 0 where there is none."""
    return next((int(each.i) for each in node.attribute if each.name == attribute), 0)


def scale_queries(graph: FloatGraph, node: onnx.NodeProto) -> None:
    """Where `node` is attention whose queries are a product, scale that product instead of scores.

    ONNX Runtime has a kernel of its own for one row times many, but none that scales on the way.
    """
    import onnx

    if node.op_type != ATTENTION:
        return
    queries = AttentionWeights.of(graph, node).queries
    if not queries.tables:
        return
    given = next((each for each in node.attribute if each.name == "scale"), None)
    factor = (given.f if given else 0.0) or queries.size**-0.5  # what the operator does without
    count = queries.heads * queries.size
    graph.scale_columns(queries.tables, queries.first, np.full(count, factor, np.float32))
    if given:
        node.attribute.remove(given)
    node.attribute.append(onnx.helper.make_attribute("scale", 1.0))


class FloatGraph:
    """The graph of a model in memory, weights and all."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._tables = {table.name: table for table in model.graph.initializer}
        self._producers = {name: node for node in model.graph.node for name in node.output if name}
        self._consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in filter(None, set(node.input)):
                self._consumers.setdefault(name, []).append(node)
        self._output_names = {output.name for output in model.graph.output}

    def find_producer(self, value: str) -> onnx.NodeProto | None:
        """The operator that puts it out; None for inputs and tables."""
        return self._producers.get(value)

    def find_consumers(self, value: str) -> Sequence[onnx.NodeProto]:
        """The operators that read it."""
        return self._consumers.get(value, ())

    def count_reads(self, name: str) -> int:
        """How often a value or a table is read; what the graph answers is read once more."""
        read = sum(list(node.input).count(name) for node in self.find_consumers(name))
        return read + (name in self._output_names)

    def has_private(self, tables: Sequence[str]) -> bool:
        """Whether all of them are known, and read once."""
        return all(name in self._tables and self.count_reads(name) == 1 for name in tables)

    def table(self, name: str) -> FloatArray:
        """Weights, to look at."""
        import onnx

        values: FloatArray = onnx.numpy_helper.to_array(self._tables[name])
        return values

    def store(self, name: str, values: FloatArray) -> None:
        """Change weights."""
        import onnx

        changed = np.ascontiguousarray(values, np.float32)
        self._tables[name].CopyFrom(onnx.numpy_helper.from_array(changed, name))

    def find_linear_weights(self, value: str) -> tuple[str, ...]:
        """The weights [K, N], and the bias [N], of the product that `value` is, and nobody else's.

        Empty where it is none, or where something else reads the value or the tables too.
        """
        find_producer = self.find_producer(value)
        if find_producer is None or self.count_reads(value) != 1:
            return ()
        if find_producer.op_type == "Add" and self.has_private(find_producer.input[1:]):
            weights = self.find_linear_weights(find_producer.input[0])
            return (*weights, find_producer.input[1]) if weights else ()
        is_own = find_producer.op_type == "MatMul" and self.has_private(find_producer.input[1:])
        return (find_producer.input[1],) if is_own else ()

    def scale_columns(self, tables: Sequence[str], first: int, factors: FloatArray) -> None:
        """Multiply the channels from `first` on, which are the last axis of every table."""
        for name in tables:
            values = self.table(name).copy()
            values[..., first : first + len(factors)] *= factors
            self.store(name, values)
