"""A mend of exported graphs: rotary position embeddings that work for more than one item."""

from __future__ import annotations

from typing import Any

Graph = Any  # an onnx_ir.Graph; the library is not typed


def repeat_rotations(graph: Graph) -> None:
    """Give every RotaryEmbedding of opset 23 its angles once per item of the batch, in place.

    The exporter's fusion hands it angles [1, T, D/2], which the operator's definition and ONNX
    Runtime refuse for a batch of more than one.
    """
    import onnx_ir

    rotated = [node for node in graph if node.op_type == "RotaryEmbedding" and node.domain == ""]
    if not rotated:
        return
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    items = onnx_ir.node("Shape", [ids], {"start": 0, "end": 1})
    ones = onnx_ir.node("Constant", [], {"value_ints": [1, 1]})
    shape = onnx_ir.node("Concat", [items.outputs[0], ones.outputs[0]], {"axis": 0})
    graph.insert_before(graph[0], [items, ones, shape])
    for node in rotated:
        for place in (1, 2):
            repeated = onnx_ir.node("Expand", [node.inputs[place], shape.outputs[0]])
            graph.insert_before(node, repeated)
            node.replace_input_with(place, repeated.outputs[0])
