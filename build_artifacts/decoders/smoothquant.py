"""Activations become easy to round: outliers move into the weights, at no cost when serving.

A few channels of what a product reads are a hundred times as large as the others, and int8 is as
coarse as the largest. Dividing each channel by a factor, and multiplying the weights that read it
by the same, changes no answer in floats and makes both even (SmoothQuant, Xiao et al. 2023,
https://arxiv.org/abs/2211.10438). Whatever makes the value does the division: the scale of a norm,
or the columns of an earlier product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from build_artifacts.decoders.float_graph import ATTENTION, AttentionWeights, FloatArray, FloatGraph

# How much of a channel's size the weights take over: 0.5 to 0.7 are best for SmolLM2-135M.
_MIGRATION_STRENGTH = 0.6
_MIN_SIZE = 1e-5  # smaller channels and weights count as this large
# Operators that scale what they put out: where their scale, and their shift, come in.
_NORMS = {
    "LayerNormalization": (1, 2),
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3),
    "SkipSimplifiedLayerNormalization": (2,),
}


class _ScaleTarget(NamedTuple):
    """What can divide a value for us: channels of tables, counted on their last axis."""

    tables: tuple[str, ...]
    first: int = 0
    # Of attention: heads of values, and the heads of queries that each of them answers.
    heads: int = 1
    copies: int = 1

    def reduce(self, sizes: FloatArray) -> FloatArray:
        """The largest of each channel's copies: [K] -> [K / copies]."""
        largest: FloatArray = sizes.reshape(self.heads, self.copies, -1).max(axis=1).ravel()
        return np.maximum(largest, _MIN_SIZE)

    def expand(self, factors: FloatArray) -> FloatArray:
        """The other way: [K / copies] -> [K]."""
        each = factors.reshape(self.heads, 1, -1)
        return np.repeat(each, self.copies, axis=1).ravel()


def smooth_activations(graph: FloatGraph, value: str, observed: FloatArray) -> FloatArray:
    """Even out a value that products read, of which [tokens, K] were `observed`: seen afterwards.

    It stays as it is where nothing can divide it, or something else reads it too.
    """
    divisor = next(_find_scale_targets(graph, value), None)
    products = graph.find_consumers(value)
    only_products = len(products) == graph.count_reads(value) and all(
        node.op_type == "MatMul" and graph.has_private(node.input[1:]) for node in products
    )
    if divisor is None or not only_products:
        return observed
    names = [node.input[1] for node in products]
    rows = np.max([np.abs(graph.table(name)).max(axis=1) for name in names], axis=0)
    sizes, weights = divisor.reduce(np.abs(observed).max(axis=0)), divisor.reduce(rows)
    factors = (sizes**_MIGRATION_STRENGTH / weights ** (1 - _MIGRATION_STRENGTH)).astype(np.float32)
    graph.scale_columns(divisor.tables, divisor.first, np.reciprocal(factors))
    expand = divisor.expand(factors)
    for name in names:
        graph.store(name, graph.table(name) * expand[:, None])
    return observed / expand


def is_bounded(graph: FloatGraph, value: str) -> bool:
    """Whether its makeup keeps it within what a few texts show of it.

    What a norm puts out has a fixed size, and attention is a mean of values. A product of two
    activations has tails that the next text may double.
    """
    find_producer = graph.find_producer(value)
    return find_producer is not None and (
        find_producer.op_type in _NORMS or find_producer.op_type == ATTENTION
    )


def _find_scale_targets(graph: FloatGraph, value: str) -> Iterator[_ScaleTarget]:
    find_producer = graph.find_producer(value)
    if find_producer is None:
        return
    if find_producer.op_type in _NORMS:
        places = (
            place for place in _NORMS[find_producer.op_type] if place < len(find_producer.input)
        )
        tables = tuple(find_producer.input[place] for place in places)
        if graph.has_private(tables):
            yield _ScaleTarget(tables)
    elif find_producer.op_type == "Mul":
        for factor in reversed(find_producer.input):
            if tables := graph.find_linear_weights(factor):
                yield _ScaleTarget(tables)
    elif find_producer.op_type == ATTENTION:
        heads = AttentionWeights.of(graph, find_producer)
        queries, (tables, first, count, _) = heads.queries, heads.values
        if tables:
            yield _ScaleTarget(tables, first, heads=count, copies=queries.heads // count)
