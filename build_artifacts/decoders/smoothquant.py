"""SmoothQuant: migration of activation outliers into the weights, without cost at inference.

A few channels of an activation are a hundred times larger than the others and determine the int8
scale. Dividing each channel by a factor and multiplying the consuming weights by it leaves the
float result unchanged (Xiao et al. 2023, https://arxiv.org/abs/2211.10438). The producer absorbs
the division: the scale of a norm, or the columns of an earlier linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from build_artifacts.decoders.float_graph import ATTENTION, AttentionWeights, FloatGraph
from build_artifacts.types import FloatArray

# Exponent of the activation size in the smoothing factor. SmolLM2-135M is best with 0.5 to 0.7.
_MIGRATION_STRENGTH = 0.6
_MIN_SIZE = 1e-5  # lower bound of channel and weight magnitudes
# Indices of the inputs that hold scale and shift, by operator.
_NORMS = {
    "LayerNormalization": (1, 2),
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3),
    "SkipSimplifiedLayerNormalization": (2,),
}


class _ScaleTarget(NamedTuple):
    """Tensors that absorb the division of an activation's channels, along their last axis."""

    tables: tuple[str, ...]
    first: int = 0  # index of the first channel in `tables`
    # For an attention output: number of value heads, and number of query heads per value head.
    heads: int = 1
    copies: int = 1

    def reduce(self, sizes: FloatArray) -> FloatArray:
        """Return the maximum over the query heads that share a value head: [K] -> [K / copies]."""
        largest: FloatArray = sizes.reshape(self.heads, self.copies, -1).max(axis=1).ravel()
        return np.maximum(largest, _MIN_SIZE)

    def expand(self, factors: FloatArray) -> FloatArray:
        """Repeat each value head for the query heads that share it: [K / copies] -> [K]."""
        each = factors.reshape(self.heads, 1, -1)
        return np.repeat(each, self.copies, axis=1).ravel()


def smooth_activations(graph: FloatGraph, value: str, observed: FloatArray) -> FloatArray:
    """Smooth an activation given samples `observed` [tokens, K]; return the smoothed samples.

    Smoothing changes weights of `graph`. An activation stays unchanged if no tensor can absorb the
    division, or if a consumer is not a MatMul. It also stays unchanged if other nodes share the
    weights of a consumer.
    """
    divisor = next(_find_scale_targets(graph, value), None)
    products = graph.find_consumers(value)
    only_products = len(products) == graph.count_reads(value) and all(
        node.op_type == "MatMul" and graph.has_private(node.input[1:]) for node in products
    )
    if divisor is None or not only_products:
        return observed
    names = [node.input[1] for node in products]
    # Weights are [K, N], or [1, K, N] if they are not to be quantized.
    rows = np.max([np.abs(graph.read(name)).max(axis=-1).ravel() for name in names], axis=0)
    sizes, weights = divisor.reduce(np.abs(observed).max(axis=0)), divisor.reduce(rows)
    factors = (sizes**_MIGRATION_STRENGTH / weights ** (1 - _MIGRATION_STRENGTH)).astype(np.float32)
    graph.scale_columns(divisor.tables, divisor.first, np.reciprocal(factors))
    expanded = divisor.expand(factors)
    for name in names:
        graph.scale_rows(name, expanded)
    return observed / expanded


def is_bounded(graph: FloatGraph, value: str) -> bool:
    """Return whether a few calibration texts suffice to estimate the range of the activation.

    The output of a norm has a fixed size, and attention averages values. A product of two
    activations has heavy tails: another text may double its largest value.
    """
    producer = graph.find_producer(value)
    return producer is not None and (producer.op_type in _NORMS or producer.op_type == ATTENTION)


def _find_scale_targets(graph: FloatGraph, value: str) -> Iterator[_ScaleTarget]:
    producer = graph.find_producer(value)
    if producer is None:
        return
    if producer.op_type in _NORMS:
        indices = (index for index in _NORMS[producer.op_type] if index < len(producer.input))
        tables = tuple(producer.input[index] for index in indices)
        if graph.has_private(tables):
            yield _ScaleTarget(tables)
    elif producer.op_type == "Mul":
        for factor in reversed(producer.input):
            if tables := graph.find_linear_weights(factor):
                yield _ScaleTarget(tables)
    elif producer.op_type == ATTENTION:
        heads = AttentionWeights.of(graph, producer)
        queries, (tables, first, count, _) = heads.queries, heads.values
        if tables:
            yield _ScaleTarget(tables, first, heads=count, copies=queries.heads // count)
