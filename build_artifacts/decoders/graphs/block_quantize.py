"""Blockwise quantization of weights to 4 or 8 bits, for the graphs of this package.

MatMuls multiply the integer weights by activations rounded to int8. Large embedding tables take
most of the file, so they are quantized too, but always to int8. The graph reads only single rows
of these tables, so 4 bits would hardly save time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.graph_nodes import ORT_DOMAIN
from build_artifacts.types import FloatArray

if TYPE_CHECKING:
    import onnx_ir as ir

Bits = Literal[4, 8]

BLOCK_SIZE = 32  # values of a weight column that share a scale
_INT8_ACCURACY_LEVEL = 4  # ONNX Runtime's `accuracy_level` for int8 MatMuls
MIN_QUANTIZED_TABLE = 1 << 20  # values; smaller tables, such as position tables, stay float


class _QuantizedBlocks(NamedTuple):
    """Weight [K, N], stored by column in ceil(K / 32) blocks."""

    packed: NDArray[np.uint8]  # [N, blocks, bytes per block]
    scales: FloatArray  # [N, blocks]


def quantize_blocks(graph: Path, into: Path, bits: Bits) -> None:
    """Write a quantized copy of the float `graph` to `into`, with its weights in a file next to it.

    `into` must be in another directory, so that its weight file does not replace that of `graph`.
    The weights are read one at a time.
    """
    import onnx_ir as ir

    model = ir.load(graph)
    for node in list(model.graph):
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
    blocks = _quantize_weight(weight.const_value.numpy(), bits)
    attributes = {
        "K": int(size),
        "N": int(columns),
        "bits": bits,
        "block_size": BLOCK_SIZE,
        "accuracy_level": _INT8_ACCURACY_LEVEL,
    }
    tensors = _add_tensors(node.graph, weight.name, blocks.packed, blocks.scales)
    return _create_node("MatMulNBits", [node.inputs[0], *tensors], attributes, node)


def _quantize_gather(node: ir.Node, table: Value) -> ir.Node:
    rows, width = table.shape
    blocks = _quantize_weight(table.const_value.numpy().T, 8)
    packed = blocks.packed.reshape(rows, width)
    data, scales = _add_tensors(node.graph, table.name, packed, blocks.scales)
    attributes = {"bits": 8, "block_size": BLOCK_SIZE, "gather_axis": 0, "quantize_axis": 1}
    return _create_node("GatherBlockQuantized", [data, node.inputs[1], scales], attributes, node)


def _quantize_weight(weight: FloatArray, bits: Bits) -> _QuantizedBlocks:
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        DefaultWeightOnlyQuantizer,
    )

    config = DefaultWeightOnlyQuantConfig(block_size=BLOCK_SIZE, is_symmetric=True, bits=bits)
    # The nodes omit zero points, because the operators assume symmetric blocks by default.
    packed, scales, _ = DefaultWeightOnlyQuantizer(config).qbits_block_quant(
        np.ascontiguousarray(weight)
    )
    return _QuantizedBlocks(packed, scales.reshape(packed.shape[:2]))


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
    op_type: str, inputs: list[Value], attributes: dict[str, int], old: ir.Node
) -> ir.Node:
    import onnx_ir as ir

    output = ir.Value(name=f"{old.name}:quantize_blocks")
    return ir.node(op_type, inputs, attributes, domain=ORT_DOMAIN, outputs=[output], name=old.name)


def _replace_node(graph: Any, old: ir.Node, new: ir.Node) -> None:
    import onnx_ir as ir

    ir.convenience.replace_nodes_and_values(graph, old, [old], [new], old.outputs, new.outputs)
