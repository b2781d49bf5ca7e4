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
_MIGRATED = 0.6
_LEAST = 1e-5  # smaller channels and weights count as this large
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

    def shared(self, sizes: FloatArray) -> FloatArray:
        """The largest of each channel's copies: [K] -> [K / copies]."""
        largest: FloatArray = sizes.reshape(self.heads, self.copies, -1).max(axis=1).ravel()
        return np.maximum(largest, _LEAST)

    def spread(self, factors: FloatArray) -> FloatArray:
        """The other way: [K / copies] -> [K]."""
        each = factors.reshape(self.heads, 1, -1)
        return np.repeat(each, self.copies, axis=1).ravel()


def smooth_activations(graph: FloatGraph, value: str, seen: FloatArray) -> FloatArray:
    """Even out a value that products read, of which [tokens, K] were `seen`: seen afterwards.

    It stays as it is where nothing can divide it, or something else reads it too.
    """
    divisor = next(_divisors(graph, value), None)
    products = graph.readers(value)
    only_products = len(products) == graph.reads(value) and all(
        node.op_type == "MatMul" and graph.has_own(node.input[1:]) for node in products
    )
    if divisor is None or not only_products:
        return seen
    names = [node.input[1] for node in products]
    rows = np.max([np.abs(graph.table(name)).max(axis=1) for name in names], axis=0)
    sizes, weights = divisor.shared(np.abs(seen).max(axis=0)), divisor.shared(rows)
    factors = (sizes**_MIGRATED / weights ** (1 - _MIGRATED)).astype(np.float32)
    graph.scale_columns(divisor.tables, divisor.first, np.reciprocal(factors))
    spread = divisor.spread(factors)
    for name in names:
        graph.store(name, graph.table(name) * spread[:, None])
    return seen / spread


def is_bounded(graph: FloatGraph, value: str) -> bool:
    """Whether its makeup keeps it within what a few texts show of it.

    What a norm puts out has a fixed size, and attention is a mean of values. A product of two
    activations has tails that the next text may double.
    """
    maker = graph.maker(value)
    return maker is not None and (maker.op_type in _NORMS or maker.op_type == ATTENTION)


def _divisors(graph: FloatGraph, value: str) -> Iterator[_ScaleTarget]:
    maker = graph.maker(value)
    if maker is None:
        return
    if maker.op_type in _NORMS:
        places = (place for place in _NORMS[maker.op_type] if place < len(maker.input))
        tables = tuple(maker.input[place] for place in places)
        if graph.has_own(tables):
            yield _ScaleTarget(tables)
    elif maker.op_type == "Mul":
        for factor in reversed(maker.input):
            if tables := graph.columns_of(factor):
                yield _ScaleTarget(tables)
    elif maker.op_type == ATTENTION:
        heads = AttentionWeights.of(graph, maker)
        queries, (tables, first, count, _) = heads.queries, heads.values
        if tables:
            yield _ScaleTarget(tables, first, heads=count, copies=queries.heads // count)
