"""MatMuls with constant weights in a float graph, and the producers of their activations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from build_artifacts.graph_nodes import only_user
from build_artifacts.smoothing.graph_edits import GraphEditor
from build_artifacts.types import FloatArray

if TYPE_CHECKING:
    import onnx_ir as ir


# Operators that return one input, reordered or with some values replaced by zeros. The number is
# the index of that input.
_MOVES_VALUES = {"Reshape": 0, "Transpose": 0, "Identity": 0, "Cast": 0, "Where": 2}
# Minimum number of weights of a wide head. Heads of labels and spans are smaller and stay float.
_MIN_WIDE_HEAD_VALUES = 1 << 20
_ATTENTION = ("Attention", "MultiHeadAttention")


@dataclass(slots=True, eq=False)
class Product:
    """A MatMul of activations [.., K] with constant weights [K, N], and the bias added to it.

    Callers may change `weights` and `bias`. ProductWriter.write stores them in the graph.
    """

    node: ir.Node
    source: ir.Value
    weights: FloatArray
    bias: FloatArray
    output: ir.Value  # output of the Add of the bias, or of the MatMul without a bias

    @property
    def name(self) -> str:
        return str(self.node.name)


def find_products(model: ir.Model) -> list[Product]:
    """Return the products of the layers in graph order, without those of the head.

    The graph adds the output of a layer to a residual stream, but not the output of a head.
    """
    inside = _find_ancestors(
        node.outputs[0]
        for node in model.graph
        if node.op_type == "Add" and not any(map(constant, node.inputs))
    )
    found = (_read_product(node) for node in model.graph if node in inside)
    return [product for product in found if product is not None]


def find_wide_heads(model: ir.Model, products: Iterable[Product]) -> list[str]:
    """Return the names of large MatMuls outside of `products`, such as the vocabulary head."""
    inside = {product.node for product in products}
    return [
        str(node.name)
        for node in model.graph
        if node.op_type == "MatMul"
        and node not in inside
        and (weights := array(node.inputs[1])) is not None
        and weights.size >= _MIN_WIDE_HEAD_VALUES
    ]


def fold_transposes(model: ir.Model, editor: GraphEditor) -> None:
    """Store constant weights that a MatMul reads transposed as the MatMul reads them.

    The head of a masked language model shares the word table, [V, K], and reads it transposed.
    """
    for node in [node for node in model.graph if node.op_type == "Transpose"]:
        table, transposed = array(node.inputs[0]), node.outputs[0]
        uses = [(user.op_type, index) for user, index in transposed.uses()]
        if table is not None and table.ndim == 2 and set(uses) == {("MatMul", 1)}:
            folded = editor.add_constant(f"{transposed.name}_folded", np.ascontiguousarray(table.T))
            transposed.replace_all_uses_with(folded)


def group_by_source(products: Iterable[Product]) -> Mapping[ir.Value, list[Product]]:
    """Return the products by the activation that they read, in graph order."""
    groups: dict[ir.Value, list[Product]] = {}
    for product in products:
        groups.setdefault(product.source, []).append(product)
    return groups


def is_attention_output(value: ir.Value) -> bool:
    """Return whether attention computes `value`.

    Attention returns weighted means of its inputs, which stay within the range of the inputs.
    """
    node = value.producer()
    while node is not None and node.op_type in _MOVES_VALUES:
        moved = node.inputs[_MOVES_VALUES[node.op_type]]
        node = moved.producer() if moved is not None else None
    if node is None:
        return False
    is_mix = node.op_type == "MatMul" and not any(map(constant, node.inputs))
    return is_mix or node.op_type in _ATTENTION


def constant(value: ir.Value | None) -> ir.Value | None:
    """Return `value` if it is a constant of the graph, else None."""
    return value if value is not None and value.const_value is not None else None


def array(value: ir.Value | None) -> FloatArray | None:
    """Return the array of a float32 constant, or None for any other value."""
    found = value.const_value.numpy() if value is not None and value.const_value else None
    return found if found is not None and found.dtype == np.float32 else None


def _read_product(node: ir.Node) -> Product | None:
    if node.op_type != "MatMul" or node.domain:
        return None
    source, weights = node.inputs[0], array(node.inputs[1])
    if source is None or weights is None or weights.ndim != 2:
        return None
    bias, output = np.zeros(weights.shape[1], np.float32), node.outputs[0]
    user = only_user(output)
    if user is not None and user.op_type == "Add":
        added = array(user.inputs[1 - [*user.inputs].index(output)])
        if added is not None and added.shape == bias.shape:
            bias, output = added, user.outputs[0]
    return Product(node, source, weights, bias, output)


def _find_ancestors(values: Iterable[ir.Value]) -> Collection[ir.Node]:
    """Return the nodes on which `values` depend."""
    found: set[ir.Node] = set()
    open_nodes = [node for value in values if (node := value.producer()) is not None]
    while open_nodes:
        node = open_nodes.pop()
        if node not in found:
            found.add(node)
            producers = (value.producer() for value in node.inputs if value is not None)
            open_nodes.extend(producer for producer in producers if producer is not None)
    return found
