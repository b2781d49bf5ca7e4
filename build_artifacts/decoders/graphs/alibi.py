"""ALiBi: each head lowers the score of a key in proportion to its distance from the query."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.graph import BFLOAT16, FLOAT, GraphWriter
from build_artifacts.decoders.graphs.kv_inputs import SelfAttentionInputs
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.types import FloatArray


def press_slopes(config: TransformersConfig) -> FloatArray:
    """Return the slope of each head, [heads], as the authors of ALiBi compute them.

    The slopes are a geometric series for the largest power of two. Further heads have every other
    slope of the series for twice that number.
    """
    heads = config.num_attention_heads
    power = 2 ** math.floor(math.log2(heads))
    slopes = _series(power) ** np.arange(1, power + 1)
    further = _series(2 * power) ** np.arange(1, 2 * (heads - power), 2)
    return np.concatenate([slopes, further]).astype(np.float32)


def _series(heads: int) -> np.float32:
    """Return the first slope and the ratio of the series for a power of two."""
    return np.float32(2 ** (-8 / heads))


@dataclass(frozen=True, slots=True, kw_only=True)
class Alibi:
    """Linear biases of the attention scores."""

    slopes: Callable[[TransformersConfig], FloatArray] = press_slopes
    # Whether slopes, positions and their products are rounded to bf16, as in Falcon's training.
    is_rounded: bool = False
    is_scaled: bool = False  # whether the default factor of the scores applies to the biases too

    def bias(
        self, graph: GraphWriter, inputs: SelfAttentionInputs, config: TransformersConfig
    ) -> Value:
        """Return the bias of the scores, [B, heads, T, M].

        Keys after the query have arbitrary values, because the attention masks them.
        """
        slopes = self.slopes(config).reshape(1, -1, 1, 1)
        queries = graph.op("Unsqueeze", inputs.positions(), graph.constant([1, 3]))
        keys = inputs.cache_positions()
        factor = (config.hidden_size // config.num_attention_heads) ** -0.5
        if not self.is_rounded:
            by_head = graph.constant(slopes * factor if self.is_scaled else slopes)
            apart = graph.op("Cast", graph.op("Sub", keys, queries), to=FLOAT)
            return graph.op("Mul", apart, by_head)
        # The rounding depends on the position of the key, so distances would not give the same.
        by_head = _round(graph, graph.constant(slopes))
        products = [
            _round(graph, graph.op("Mul", _round(graph, positions), by_head))
            for positions in (keys, queries)
        ]
        # The softmax ignores what all keys of a query have in common, here the query's product.
        bias = graph.op("Sub", *products)
        return graph.op("Mul", bias, graph.constant(factor)) if self.is_scaled else bias


def _round(graph: GraphWriter, value: Value) -> Value:
    """Round to bf16, as float."""
    return graph.op("Cast", graph.op("Cast", value, to=BFLOAT16), to=FLOAT)
