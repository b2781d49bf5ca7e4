"""Float graph of a decoder: producers, consumers, and weights that are read when needed.

The weights of a model may take most of the memory, so none is kept. A change of a weight is a
factor per row or column, which is applied whenever the weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from build_artifacts.types import FloatArray

if TYPE_CHECKING:
    import onnx


ATTENTION = "GroupQueryAttention"


class WeightColumns(NamedTuple):
    """Columns of the attention heads in the weights and the bias of one linear layer."""

    tables: tuple[str, ...]  # names of weight and bias; empty if the layer is missing or shared
    first: int  # index of the first column
    heads: int
    size: int  # columns per head


class AttentionWeights(NamedTuple):
    """Query and value projections of one attention node."""

    queries: WeightColumns
    values: WeightColumns

    @classmethod
    def of(cls, graph: FloatGraph, node: onnx.NodeProto) -> Self:
        """Find the projections: one packed linear layer, or one each for query, key and value."""
        queries, values = (
            read_int_attribute(node, "num_heads"),
            read_int_attribute(node, "kv_num_heads"),
        )
        is_packed = not node.input[2]
        query_tables = graph.find_linear_weights(node.input[0])
        value_tables = query_tables if is_packed else graph.find_linear_weights(node.input[2])
        width = graph.shape(query_tables[0])[-1] if query_tables else 0
        size = width // (queries + 2 * values if is_packed else queries)
        if value_tables and not query_tables:
            size = graph.shape(value_tables[0])[-1] // values
        first = (queries + values) * size if is_packed else 0
        return cls(
            WeightColumns(query_tables, 0, queries, size),
            WeightColumns(value_tables, first, values, size),
        )


def read_int_attribute(node: onnx.NodeProto, attribute: str) -> int:
    """Read an integer attribute; 0 when it is absent."""
    return next((int(each.i) for each in node.attribute if each.name == attribute), 0)


def scale_queries(graph: FloatGraph, node: onnx.NodeProto) -> None:
    """Move the score scale of an attention node into its query projection.

    ONNX Runtime has a fast kernel for one row times a matrix, but uses it only if the scale is 1.
    The node stays unchanged if it is no attention, or if its query projection is missing or shared.
    """
    import onnx

    if node.op_type != ATTENTION:
        return
    queries = AttentionWeights.of(graph, node).queries
    if not queries.tables:
        return
    given = next((each for each in node.attribute if each.name == "scale"), None)
    factor = (given.f if given else 0.0) or queries.size**-0.5  # default scale of the operator
    count = queries.heads * queries.size
    graph.scale_columns(queries.tables, queries.first, np.full(count, factor, np.float32))
    if given:
        node.attribute.remove(given)
    node.attribute.append(onnx.helper.make_attribute("scale", 1.0))


@dataclass(slots=True)
class _FloatTensor:
    """A tensor of a graph, and the factors by which it changed since."""

    shape: tuple[int, ...]
    read: Callable[[], FloatArray]
    factors: list[tuple[slice, FloatArray]] = field(default_factory=list)  # of channels, [.., N]

    def read_scaled(self) -> FloatArray:
        values = self.read()
        if not self.factors:
            return values
        scaled = values.copy()
        for channels, factors in self.factors:
            scaled[..., channels] *= factors
        return scaled


class FloatGraph:
    """Float graph of `model`, whose weight file, if it has one, is in `directory`."""

    def __init__(self, model: onnx.ModelProto, directory: Path) -> None:
        self._tensors = {
            table.name: _FloatTensor(tuple(table.dims), _build_reader(table, directory))
            for table in model.graph.initializer
        }
        self._producers = {name: node for node in model.graph.node for name in node.output if name}
        self._consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in filter(None, set(node.input)):
                self._consumers.setdefault(name, []).append(node)
        self._output_names = {output.name for output in model.graph.output}

    def find_producer(self, value: str) -> onnx.NodeProto | None:
        """Return the node that computes `value`; None for graph inputs and initializers."""
        return self._producers.get(value)

    def find_consumers(self, value: str) -> Sequence[onnx.NodeProto]:
        return self._consumers.get(value, ())

    def count_reads(self, name: str) -> int:
        """Count the reads of a value or an initializer. A graph output counts as one read."""
        read = sum(list(node.input).count(name) for node in self.find_consumers(name))
        return read + (name in self._output_names)

    def has_private(self, tables: Sequence[str]) -> bool:
        """Return whether all tensors exist and the graph reads each of them exactly once."""
        return all(name in self._tensors and self.count_reads(name) == 1 for name in tables)

    @property
    def names(self) -> Sequence[str]:
        """Names of all tensors."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str) -> FloatArray:
        """Return a tensor with all changes, which the caller must not write to."""
        return self._tensors[name].read_scaled()

    def add_transposed(self, source: str, name: str) -> None:
        """Add the tensor `name`, the transposed matrix `source`."""
        rows, columns = self.shape(source)
        self._tensors[name] = _FloatTensor((columns, rows), lambda: self.read(source).T)

    def find_linear_weights(self, value: str) -> tuple[str, ...]:
        """Return the names of the weights of the linear layer that computes `value`.

        The result has the weights [K, N] and, if there is one, the bias [N]. It is empty if no
        linear layer computes `value`, or if `value`, the weights or the bias have other consumers.
        """
        producer = self.find_producer(value)
        if producer is None or self.count_reads(value) != 1:
            return ()
        if producer.op_type == "Add" and self.has_private(producer.input[1:]):
            weights = self.find_linear_weights(producer.input[0])
            return (*weights, producer.input[1]) if weights else ()
        is_own = producer.op_type == "MatMul" and self.has_private(producer.input[1:])
        return (producer.input[1],) if is_own else ()

    def scale_columns(self, tables: Sequence[str], first: int, factors: FloatArray) -> None:
        """Multiply channels by `factors`, from channel `first` on. Channels are the last axis."""
        for name in tables:
            channels = slice(first, first + len(factors))
            self._tensors[name].factors.append((channels, factors))

    def scale_rows(self, table: str, factors: FloatArray) -> None:
        """Multiply the rows of a matrix [.., K, N] by `factors` [K]."""
        self._tensors[table].factors.append((slice(None), factors[:, None]))


def _build_reader(table: onnx.TensorProto, directory: Path) -> Callable[[], FloatArray]:
    """Return a function that reads a tensor, from its part of the weight file if it is there."""
    import onnx

    if table.data_location != onnx.TensorProto.EXTERNAL:
        return lambda: onnx.numpy_helper.to_array(table)
    place = onnx.external_data_helper.ExternalDataInfo(table)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(table.data_type)
    shape, offset = tuple(table.dims), place.offset or 0
    return lambda: np.memmap(directory / place.location, dtype, "r", offset, shape)
