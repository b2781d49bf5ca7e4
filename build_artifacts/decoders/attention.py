"""Attention as the model builder writes it: whose columns are queries, and whose are values."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from build_artifacts.decoders.float_graph import FloatGraph

if TYPE_CHECKING:
    import onnx

ORT_DOMAIN = "com.microsoft"  # where operators are from that only ONNX Runtime has
ATTENTION = "GroupQueryAttention"


class Columns(NamedTuple):
    """Columns of the weights, and of the bias, of a product."""

    tables: tuple[str, ...]  # empty where they are none of a product of its own
    first: int
    heads: int
    size: int  # of a head


class Heads(NamedTuple):
    """The products that one attention reads."""

    queries: Columns
    values: Columns

    @classmethod
    def of(cls, graph: FloatGraph, node: onnx.NodeProto) -> Self:
        """Queries, keys and values come side by side from one product, or from one each."""
        queries, values = number_of(node, "num_heads"), number_of(node, "kv_num_heads")
        is_packed = not node.input[2]
        query_tables = graph.columns_of(node.input[0])
        value_tables = query_tables if is_packed else graph.columns_of(node.input[2])
        width = graph.table(query_tables[0]).shape[-1] if query_tables else 0
        size = width // (queries + 2 * values if is_packed else queries)
        if value_tables and not query_tables:
            size = graph.table(value_tables[0]).shape[-1] // values
        first = (queries + values) * size if is_packed else 0
        return cls(
            Columns(query_tables, 0, queries, size), Columns(value_tables, first, values, size)
        )


def number_of(node: onnx.NodeProto, attribute: str) -> int:
    """An attribute that is a whole number; 0 where there is none."""
    return next((int(each.i) for each in node.attribute if each.name == attribute), 0)


def scale_queries(graph: FloatGraph, node: onnx.NodeProto) -> None:
    """Where `node` is attention whose queries are a product, scale that product instead of scores.

    ONNX Runtime has a kernel of its own for one row times many, but none that scales on the way.
    """
    import onnx

    if node.op_type != ATTENTION:
        return
    queries = Heads.of(graph, node).queries
    if not queries.tables:
        return
    given = next((each for each in node.attribute if each.name == "scale"), None)
    factor = (given.f if given else 0.0) or queries.size**-0.5  # what the operator does without
    count = queries.heads * queries.size
    graph.scale_columns(queries.tables, queries.first, np.full(count, factor, np.float32))
    if given:
        node.attribute.remove(given)
    node.attribute.append(onnx.helper.make_attribute("scale", 1.0))
