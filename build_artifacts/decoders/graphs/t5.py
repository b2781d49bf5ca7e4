"""Graph builder for T5: RMS norms, unscaled scores, relative position bias."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.graph import GraphWriter
from build_artifacts.decoders.graphs.kv_inputs import (
    AttentionOptions,
    CrossAttentionInputs,
    EncoderInputs,
    HeadShape,
    ModelGraphs,
    SelfAttentionInputs,
)
from build_artifacts.decoders.graphs.operators import Value, distance_buckets
from build_artifacts.decoders.graphs.weights import CheckpointWeights, Side, embedding_names
from build_artifacts.types import FloatArray

_SELF, _CROSS = "layer.0.SelfAttention", "layer.1.EncDecAttention"


def build_t5(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graphs of a T5, mT5 or Flan-T5.

    Raises UnsupportedModel for an unsupported activation or head size, or a missing tensor.
    """
    weights = CheckpointWeights(checkpoint)
    decoder = _T5Decoder(config, weights)
    vocabulary = decoder.build()
    return ModelGraphs(
        encoder=_T5Encoder(config, weights).build(),
        decoder=decoder.graph,
        layers=config.num_decoder_layers,
        shape=decoder.shape,
        vocabulary=vocabulary,
    )


class _T5Stack:
    """Base of the encoder and the decoder: the sublayers that both contain."""

    def __init__(self, config: TransformersConfig, weights: CheckpointWeights, side: Side) -> None:
        self.graph = GraphWriter(side, weights)
        self.shape = HeadShape(config.num_heads, config.d_kv, scale=1.0)
        self._config, self._side = config, side

    def _embed(self, ids: Value) -> Value:
        name = self.graph.weights.first(embedding_names(self._side))
        return self.graph.op("Gather", self.graph.stored(name), ids)

    def _norm(self, hidden: Value, module: str) -> Value:
        return self._norm_by(hidden, self.graph.stored(f"{module}.weight"))

    def _norm_by(self, hidden: Value, scale: Value) -> Value:
        return self.graph.rms_norm(hidden, scale, self._config.layer_norm_epsilon)

    def _feed_forward(self, layer: str, hidden: Value) -> Value:
        graph, config, dense = self.graph, self._config, f"{layer}.DenseReluDense"
        normed = self._norm(hidden, f"{layer}.layer_norm")
        if config.is_gated_act:
            gate = graph.linear(normed, [f"{dense}.wi_0"])
            active = graph.activation(gate, config.dense_act_fn)
            inner = graph.op("Mul", active, graph.linear(normed, [f"{dense}.wi_1"]))
        else:
            inner = graph.activation(graph.linear(normed, [f"{dense}.wi"]), config.dense_act_fn)
        return graph.op("Add", hidden, graph.linear(inner, [f"{dense}.wo"]))

    def _bias(self, queries: Value, keys: Value, ahead: int) -> Value:
        """Return the relative position bias of the scores, [heads, X, Y, Z].

        `queries` [X, Y, 1] and `keys` [Z] are positions. The table has one column per distance, key
        minus query, from `-farthest` to `ahead`; `farthest` is `relative_attention_max_distance`.
        Greater distances use the outermost column. `ahead` is 0 where later keys are masked.
        """
        config, graph = self._config, self.graph
        farthest = config.relative_attention_max_distance
        module = f"{self._side}.block.0.{_SELF}.relative_attention_bias.weight"
        buckets = distance_buckets(
            np.arange(-farthest, ahead + 1),
            both_ways=self._side == "encoder",
            buckets=config.relative_attention_num_buckets,
            farthest=farthest,
        )

        def read() -> FloatArray:
            return graph.weights.read(module)[buckets].T

        table = graph.weight("bias_by_distance", (config.num_heads, len(buckets)), read)
        moved = graph.op("Add", keys, graph.constant(farthest))
        columns = graph.op("Sub", moved, queries)  # column of the table for each key and query
        ends = graph.constant(0), graph.constant(len(buckets) - 1)
        return graph.op("Gather", table, graph.op("Clip", columns, *ends), axis=1)


class _T5Encoder(_T5Stack):
    def __init__(self, config: TransformersConfig, weights: CheckpointWeights) -> None:
        super().__init__(config, weights, "encoder")
        self._encoder_inputs = EncoderInputs(self.graph)

    def build(self) -> GraphWriter:
        graph, hidden, bias = (
            self.graph,
            self._embed(self._encoder_inputs.ids),
            self._position_bias(),
        )
        for layer in range(self._config.num_layers):
            hidden = self._layer(f"encoder.block.{layer}", hidden, bias)
        states = self._norm(hidden, "encoder.final_layer_norm")
        for layer in range(self._config.num_decoder_layers):
            name = f"decoder.block.{layer}.{_CROSS}"
            projected = [graph.linear(states, [f"{name}.{part}"]) for part in "kv"]
            self._encoder_inputs.export_cross_kv(layer, projected, self.shape)
        return graph

    def _position_bias(self) -> Value:
        """Return the relative position bias [1, heads, S, S]."""
        graph, positions = self.graph, self._encoder_inputs.positions()
        queries = graph.op("Unsqueeze", positions, graph.constant([0, 2]))
        farthest = self._config.relative_attention_max_distance
        bias = self._bias(queries, positions, ahead=farthest)
        return graph.op("Transpose", bias, perm=[1, 0, 2, 3])

    def _layer(self, name: str, hidden: Value, bias: Value) -> Value:
        graph, attn = self.graph, f"{name}.{_SELF}"
        normed = self._norm(hidden, f"{name}.layer.0.layer_norm")
        parts = [graph.linear(normed, [f"{attn}.{part}"]) for part in "qkv"]
        attended = self._encoder_inputs.attend(parts, self.shape, attn, bias)
        hidden = graph.op("Add", hidden, graph.linear(attended, [f"{attn}.o"]))
        return self._feed_forward(f"{name}.layer.1", hidden)


class _T5Decoder(_T5Stack):
    def __init__(self, config: TransformersConfig, weights: CheckpointWeights) -> None:
        super().__init__(config, weights, "decoder")
        self._self_inputs = SelfAttentionInputs(self.graph)
        self._cross_inputs = CrossAttentionInputs(self.graph, self._self_inputs.tokens, self.shape)

    def build(self) -> int:
        """Build the decoder and return its vocabulary size."""
        graph, hidden, bias = self.graph, self._embed(self._self_inputs.ids), self._position_bias()
        for layer in range(self._config.num_decoder_layers):
            hidden = self._layer(layer, hidden, bias)
        states = self._norm_by(
            self._self_inputs.select_logits_positions(hidden), self._last_scale()
        )
        logits, vocabulary = graph.head(states, ["lm_head.weight", *embedding_names("decoder")])
        graph.output(logits, "logits", "B", "L", vocabulary)
        return vocabulary

    def _position_bias(self) -> Value:
        """Return the relative position bias [B, heads, T, M] for keys up to the query."""
        graph = self.graph
        queries = graph.op("Unsqueeze", self._self_inputs.positions(), graph.constant([2]))
        bias = self._bias(queries, self._self_inputs.cache_positions(), ahead=0)
        return graph.op("Transpose", bias, perm=[1, 0, 2, 3])

    def _last_scale(self) -> Value:
        """Return the scale of the last norm, multiplied by the scale of the logits."""
        graph, config, name = self.graph, self._config, "decoder.final_layer_norm.weight"
        scales = getattr(config, "scale_decoder_outputs", False)  # absent in mT5
        factor = config.d_model**-0.5 if scales else 1.0
        return graph.weight(
            name, graph.weights.shape(name), lambda: graph.weights.read(name) * np.float32(factor)
        )

    def _layer(self, layer: int, hidden: Value, bias: Value) -> Value:
        graph, name = self.graph, f"decoder.block.{layer}"
        attn, cross = f"{name}.{_SELF}", f"{name}.{_CROSS}"
        normed = self._norm(hidden, f"{name}.layer.0.layer_norm")
        joined = graph.linear(normed, [f"{attn}.{part}" for part in "qkv"], label=f"{attn}.qkv")
        options = AttentionOptions(bias=bias)
        attended = self._self_inputs.attend(layer, [joined], self.shape, options)
        hidden = graph.op("Add", hidden, graph.linear(attended, [f"{attn}.o"]))
        normed = self._norm(hidden, f"{name}.layer.1.layer_norm")
        query = graph.linear(normed, [f"{cross}.q"])
        attended = self._cross_inputs.attend(layer, query)
        hidden = graph.op("Add", hidden, graph.linear(attended, [f"{cross}.o"]))
        return self._feed_forward(f"{name}.layer.2", hidden)
