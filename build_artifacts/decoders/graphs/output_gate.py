"""Gates of the attention's output."""

from __future__ import annotations

from build_artifacts.decoders.graphs.graph import GraphWriter
from build_artifacts.decoders.graphs.kv_inputs import HeadShape
from build_artifacts.decoders.graphs.operators import Value


def apply_gate(
    graph: GraphWriter, attended: Value, hidden: Value, module: str, shape: HeadShape
) -> Value:
    """Multiply `attended` by sigmoids of a linear layer of the token vectors `hidden`.

    Both are [B, T, ...]. The layer has a gate for each channel of `attended`, or for each head.
    """
    gates = graph.op("Sigmoid", graph.linear(hidden, [module]))
    if graph.weights.shape(f"{module}.weight")[0] != shape.heads:
        return graph.op("Mul", attended, gates)
    apart = graph.op("Reshape", attended, graph.constant([0, 0, shape.heads, shape.size]))
    gated = graph.op("Mul", apart, graph.op("Unsqueeze", gates, graph.constant([-1])))
    return graph.op("Reshape", gated, graph.constant([0, 0, -1]))
