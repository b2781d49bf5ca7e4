"""Blockwise quantization of weights to 4 or 8 bits, for the graphs of this package.

Large embedding tables take most of the file, so they are quantized too, but always to int8. The
graph reads only single rows of these tables, so 4 bits would hardly save time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from build_artifacts.decoders.block_weights import (
    BLOCK_SIZE,
    EXPERT_WEIGHT_INPUTS,
    EXPERTS,
    INT8_ACCURACY_LEVEL,
    QUANTIZED_EXPERTS,
    Bits,
    expert_attributes,
    has_whole_blocks,
    quantize_experts,
    quantize_weight,
)
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.graph_nodes import ORT_DOMAIN
from build_artifacts.types import FloatArray

if TYPE_CHECKING:
    import onnx_ir as ir

MIN_QUANTIZED_TABLE = 1 << 20  # values; smaller tables, such as position tables, stay float


def quantize_blocks(graph: Path, into: Path, bits: Bits) -> None:
    """Write a quantized copy of the float `graph` to `into`, with its weights in a file next to it.

    `into` must be in another directory, so that its weight file does not replace that of `graph`.
    The weights are read one at a time.
    """
    import onnx_ir as ir

    model = ir.load(graph)
    for node in list(model.graph):
        if _has_quantizable_experts(node):
            _replace_node(model.graph, node, _quantize_experts(node, bits))
            continue
        weight = _find_constant(node)
        if weight is None:
            continue
        if node.op_type == "MatMul":
            _replace_node(model.graph, node, _quantize_matmul(node, weight, bits))
        elif node.op_type == "Gather" and _is_large_table(node, weight):
            _replace_node(model.graph, node, _quantize_gather(node, weight))
    for name, value in list(model.graph.initializers.items()):
        if not value.uses():
            del model.graph.initializers[name]
    ir.save(model, into, external_data=f"{into.name}.data")


def _has_quantizable_experts(node: ir.Node) -> bool:
    return node.op_type == EXPERTS and all(
        has_whole_blocks(node.inputs[index].shape) for index in EXPERT_WEIGHT_INPUTS
    )


def _find_constant(node: ir.Node) -> Value | None:
    """Return the constant matrix that a MatMul or a Gather reads; None if the node reads none."""
    weight_index = {"MatMul": 1, "Gather": 0}
    if node.op_type not in weight_index:
        return None
    value = node.inputs[weight_index[node.op_type]]
    known = value is not None and value.const_value is not None and len(value.shape) == 2
    return value if known else None


def _is_large_table(node: ir.Node, table: Value) -> bool:
    rows, width = table.shape
    by_rows = "axis" not in node.attributes or node.attributes["axis"].as_int() == 0
    return bool(by_rows and rows * width >= MIN_QUANTIZED_TABLE and width % BLOCK_SIZE == 0)


def _quantize_matmul(node: ir.Node, weight: Value, bits: Bits) -> ir.Node:
    size, columns = weight.shape
    blocks = quantize_weight(weight.const_value.numpy(), bits)
    attributes = {
        "K": int(size),
        "N": int(columns),
        "bits": bits,
        "block_size": BLOCK_SIZE,
        "accuracy_level": INT8_ACCURACY_LEVEL,
    }
    tensors = _add_tensors(node.graph, weight.name, blocks.packed, blocks.scales)
    return _create_node("MatMulNBits", [node.inputs[0], *tensors], attributes, node)


def _quantize_gather(node: ir.Node, table: Value) -> ir.Node:
    rows, width = table.shape
    blocks = quantize_weight(table.const_value.numpy().T, 8)
    packed = blocks.packed.reshape(rows, width)
    data, scales = _add_tensors(node.graph, table.name, packed, blocks.scales)
    attributes = {"bits": 8, "block_size": BLOCK_SIZE, "gather_axis": 0, "quantize_axis": 1}
    return _create_node("GatherBlockQuantized", [data, node.inputs[1], scales], attributes, node)


def _quantize_experts(node: ir.Node, bits: Bits) -> ir.Node:
    inputs: list[Value | None] = []
    for index, value in enumerate(node.inputs):
        if index not in EXPERT_WEIGHT_INPUTS:
            inputs.append(value)
            continue
        blocks = quantize_experts(value.const_value.numpy(), bits)
        inputs += _add_tensors(node.graph, value.name, *blocks)
    attributes = dict(node.attributes) | expert_attributes(bits)
    return _create_node(QUANTIZED_EXPERTS, inputs, attributes, node)


def _add_tensors(
    graph: Any, name: str, packed: NDArray[np.uint8], scales: FloatArray
) -> list[Value]:
    """Add `packed` and `scales` to the graph. Reuse them if an earlier node has the same weight."""
    import onnx_ir as ir

    values = []
    for part, array in (("packed", packed), ("scales", scales)):
        part_name = f"{name}.{part}"
        if part_name not in graph.initializers:
            tensor = ir.tensor(array, name=part_name)
            graph.initializers[part_name] = ir.Value(
                name=part_name,
                shape=tensor.shape,
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
        values.append(graph.initializers[part_name])
    return values


def _create_node(
    op_type: str, inputs: Sequence[Value | None], attributes: Mapping[str, Any], old: ir.Node
) -> ir.Node:
    import onnx_ir as ir

    output = ir.Value(name=f"{old.name}:quantize_blocks")
    return ir.node(op_type, inputs, attributes, domain=ORT_DOMAIN, outputs=[output], name=old.name)


def _replace_node(graph: Any, old: ir.Node, new: ir.Node) -> None:
    import onnx_ir as ir

    ir.convenience.replace_nodes_and_values(graph, old, [old], [new], old.outputs, new.outputs)
