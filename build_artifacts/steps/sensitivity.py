"""Ranking of MatMuls by int8 error: the order of exclusion from quantization.

This module computes each MatMul with constant weights twice on the float graph's activations: in
float, and with both operands rounded as in dynamic int8. The MatMul with the largest relative error
comes first. One forward pass yields the errors of all MatMuls, so there is no need for one graph
per MatMul. Ranking layers by signal-to-quantization-noise follows Lin, Talathi, Annapureddy, "Fixed
Point Quantization of Deep Convolutional Networks", 2016.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from build_artifacts.graph_files import open_with_outputs
from deployments.batching.batch_policy import collate
from deployments.engines.graph_io import build_feeds
from deployments.messages import TokenizedItem

Matrix = NDArray[np.float32]

ITEMS = 6  # calibration items in the forward pass
TOKENS = 64  # tokens per item: enough to include outliers, few enough for large models


@dataclass(frozen=True, slots=True)
class _MatMul:
    node: str
    activation: str
    weight: str


def rank_by_sensitivity(
    graph: Path, items: Sequence[TokenizedItem], mask_token: int | None
) -> list[str]:
    """Return the names of the MatMuls with constant weights, the most sensitive first."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(graph)
    weights = {i.name: i for i in model.graph.initializer if len(i.dims) == 2}
    products = [
        _MatMul(node.name, node.input[0], node.input[1])
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in weights
    ]
    activations = _read_activations(graph, {p.activation for p in products}, items, mask_token)
    errors = {
        p.node: relative_error(activations[p.activation], numpy_helper.to_array(weights[p.weight]))
        for p in products
    }
    return sorted(errors, key=lambda node: -errors[node])


def relative_error(activations: Matrix, weights: Matrix) -> float:
    """Return the relative error of int8 for `activations` [N, K] times `weights` [K, M]."""
    exact = activations @ weights
    rounded = _round_to_int8(activations) @ _round_to_int8(weights, per_column=True)
    scale = float(np.linalg.norm(exact))
    return float(np.linalg.norm(rounded - exact)) / scale if scale else 0.0


def _round_to_int8(values: Matrix, *, per_column: bool = False) -> Matrix:
    """Round to a grid of 255 equal steps from the minimum to the maximum, extended to zero."""
    axis = 0 if per_column else None
    low = np.minimum(values.min(axis=axis), 0)
    step = np.maximum(np.maximum(values.max(axis=axis), 0) - low, 1e-12) / 255
    shift = np.round(low / step)
    rounded: Matrix = ((np.round(values / step - shift) + shift) * step).astype(np.float32)
    return rounded


def _read_activations(
    graph: Path, names: set[str], items: Sequence[TokenizedItem], mask_token: int | None
) -> Mapping[str, Matrix]:
    """Return the activations `names` for one padded batch, [tokens, K] each."""
    from onnxruntime import GraphOptimizationLevel

    ordered = sorted(names)
    session = open_with_outputs(graph, ordered, GraphOptimizationLevel.ORT_DISABLE_ALL)
    cut = [TokenizedItem(ids[:TOKENS], min(second, TOKENS)) for ids, second in items[:ITEMS]]
    feeds = build_feeds(collate(cut), [i.name for i in session.get_inputs()], mask_token)
    found = session.run(ordered, feeds.arrays)
    return {
        name: np.asarray(value, dtype=np.float32).reshape(-1, value.shape[-1])
        for name, value in zip(ordered, found, strict=True)
    }
