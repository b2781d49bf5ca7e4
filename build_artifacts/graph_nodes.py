"""Helpers of all ONNX graph rewrites: operator domain and consumers of a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

ORT_DOMAIN = "com.microsoft"  # domain of the operators that only ONNX Runtime implements


def only_user(value: ir.Value) -> ir.Node | None:
    """Return the node with the only read of `value`.

    Return None if `value` has no or several reads, or if it is a graph output.
    """
    users = value.uses()
    return users[0].node if len(users) == 1 and not value.is_graph_output() else None
