"""Attention without a scale of its own: the weights of the queries have it.

ONNX Runtime has a kernel of its own for one row times many, but none that scales on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from build_artifacts.decoders.float_graph import ATTENTION, FloatGraph

if TYPE_CHECKING:
    import onnx


def scale_queries(graph: FloatGraph, node: onnx.NodeProto) -> None:
    """Where `node` is attention whose queries are a product, scale that product instead."""
    import onnx

    if node.op_type != ATTENTION:
        return
    attributes = {attribute.name: attribute for attribute in node.attribute}
    heads, queries = attributes["kv_num_heads"].i, attributes["num_heads"].i
    tables = graph.columns_of(node.input[0])
    if not tables:
        return
    packed = not node.input[2]
    columns = graph.table(tables[0]).shape[-1]
    head_size = columns // (queries + 2 * heads if packed else queries)
    scale = attributes["scale"].f if "scale" in attributes else 0.0
    factor = scale or head_size**-0.5  # what the operator does without one
    graph.scale_columns(tables, 0, np.full(queries * head_size, factor, np.float32))
    if "scale" in attributes:
        node.attribute.remove(attributes["scale"])
    node.attribute.append(onnx.helper.make_attribute("scale", 1.0))
