"""Insertion of nodes and constants into a graph under new names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from build_artifacts.graph_nodes import ORT_DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

# Operators that only ONNX Runtime implements.
_ORT_OPERATORS = {"MatMulIntegerToFloat"}


class GraphEditor:
    """Editor that adds nodes and constants to one model. Callers must pass new names."""

    def __init__(self, model: ir.Model) -> None:
        self._graph = model.graph

    def add_constant(self, name: str, values: NDArray[np.generic] | np.generic) -> ir.Value:
        import onnx_ir as ir

        tensor = ir.tensor(np.asarray(values), name=name)
        value = ir.Value(
            name=name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(tensor.dtype)
        )
        self._graph.register_initializer(value)
        return value

    def insert_after(
        self, place: ir.Node, op_type: str, inputs: Sequence[ir.Value], name: str
    ) -> ir.Value:
        """Insert a node after `place`; return its output."""
        node = self._make_node(op_type, inputs, name, {})
        self._graph.insert_after(place, node)
        return node.outputs[0]

    def insert_before(
        self,
        place: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value],
        name: str,
        **attributes: int,
    ) -> ir.Value:
        """Insert a node before `place`; return its output."""
        node = self._make_node(op_type, inputs, name, attributes)
        self._graph.insert_before(place, node)
        return node.outputs[0]

    def _make_node(
        self, op_type: str, inputs: Sequence[ir.Value], name: str, attributes: Mapping[str, int]
    ) -> ir.Node:
        import onnx_ir as ir

        domain = ORT_DOMAIN if op_type in _ORT_OPERATORS else ""
        if domain:
            self._graph.opset_imports.setdefault(domain, 1)
        node = ir.node(op_type, inputs, attributes, domain=domain, name=name)
        node.outputs[0].name = name
        return node
