"""ALiBi: biases that lower the score of a key in proportion to its distance from the query.

Keys after the query get arbitrary biases, because the attention masks them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.graph import BFLOAT16, FLOAT, GraphWriter
from build_artifacts.decoders.graphs.kv_inputs import SelfAttentionInputs
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.types import FloatArray

# Returns the bias of the scores, [B, heads, T, M].
BuildBias = Callable[[GraphWriter, SelfAttentionInputs, TransformersConfig], Value]


def build_bloom_bias(
    graph: GraphWriter, inputs: SelfAttentionInputs, config: TransformersConfig
) -> Value:
    """Return the bias with the slopes of ALiBi's authors, [B, heads, T, M]."""
    return _multiply_distances(graph, inputs, _compute_slopes(config.num_attention_heads))


def build_mpt_bias(
    graph: GraphWriter, inputs: SelfAttentionInputs, config: TransformersConfig
) -> Value:
    """Return the bias of MPT, [B, heads, T, M].

    If the number of heads is no power of two, the slopes are from the series for the next one:
    every other slope, then those between them.
    """
    heads = config.num_attention_heads
    power = 2 ** math.ceil(math.log2(heads))
    slopes = _compute_series(power)
    if power != heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:heads]
    return _multiply_distances(graph, inputs, slopes)


def build_falcon_bias(
    graph: GraphWriter, inputs: SelfAttentionInputs, config: TransformersConfig
) -> Value:
    """Return the bias of Falcon, [B, heads, T, M].

    Slopes, positions and their products are rounded to bf16, as in its training. The scale of the
    scores applies to the bias too.
    """
    slopes = _compute_slopes(config.num_attention_heads).reshape(1, -1, 1, 1)
    scale = graph.constant((config.hidden_size // config.num_attention_heads) ** -0.5)
    # Products of positions are rounded, so a bias is no product of the distance. Subtracting the
    # query's product changes no result: the softmax ignores what all keys have in common.
    products = []
    for positions in (inputs.cache_positions(), _align_queries(graph, inputs)):
        rounded = [_round(graph, value) for value in (positions, graph.constant(slopes))]
        product = _round(graph, graph.op("Mul", *rounded))
        products.append(graph.op("Mul", product, scale))
    return graph.op("Sub", *products)


def _multiply_distances(
    graph: GraphWriter, inputs: SelfAttentionInputs, slopes: FloatArray
) -> Value:
    """Multiply the distances, key minus query, by `slopes` [heads]."""
    apart = graph.op("Sub", inputs.cache_positions(), _align_queries(graph, inputs))
    by_head = graph.constant(slopes.reshape(1, -1, 1, 1))
    return graph.op("Mul", graph.op("Cast", apart, to=FLOAT), by_head)


def _align_queries(graph: GraphWriter, inputs: SelfAttentionInputs) -> Value:
    """Return the positions of the queries, [B, 1, T, 1]."""
    return graph.op("Unsqueeze", inputs.positions(), graph.constant([1, 3]))


def _round(graph: GraphWriter, value: Value) -> Value:
    """Round to bf16, as float."""
    return graph.op("Cast", graph.op("Cast", value, to=BFLOAT16), to=FLOAT)


def _compute_slopes(heads: int) -> FloatArray:
    """Return the slope of each head.

    They are the series for the largest power of two, and every other slope of the series for twice
    that number.
    """
    power = 2 ** math.floor(math.log2(heads))
    return np.concatenate([_compute_series(power), _compute_series(2 * power)[::2]])[:heads]


def _compute_series(heads: int) -> FloatArray:
    """Return the slopes for a power of two: a geometric series that ends with 2^-8."""
    ratio = np.float32(2 ** (-8 / heads))
    slopes: FloatArray = ratio ** np.arange(1, heads + 1, dtype=np.float32)
    return slopes
