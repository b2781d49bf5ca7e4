"""Graph builder for BART and related encoder-decoders with layer norms and absolute positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.graph import GraphWriter
from build_artifacts.decoders.graphs.kv_inputs import (
    CrossAttentionInputs,
    EncoderInputs,
    HeadShape,
    ModelGraphs,
    SelfAttentionInputs,
)
from build_artifacts.decoders.graphs.operators import Value, sinusoids, stretched_sinusoids
from build_artifacts.decoders.graphs.weights import CheckpointWeights, Side, embedding_names
from build_artifacts.types import FloatArray

_EPSILON = 1e-5  # default of torch's LayerNorm; no config of the family overrides it
_FAIRSEQ_OFFSET = 2  # rows of fairseq's position tables before the row of the first token

PositionTable = Callable[[int, int], FloatArray]  # (rows, width) -> position table
Sublayer = Callable[[Value], Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class BartLike:
    """Variant of the BART architecture. A call builds the graphs of a checkpoint."""

    # True: norm before each sublayer and after the last layer. False: norm after each sublayer.
    norms_first: bool
    norms_words: bool  # True: norm after the sum of word and position embeddings
    # Rows of the position table before the row of the first token. None: pad_token_id + 1.
    offset: int | None
    # Computes the position table if the checkpoint has none. None: the checkpoint has the table.
    table: PositionTable | None = None

    def __call__(self, config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
        """Build the graphs of a checkpoint.

        Raises UnsupportedModel for an unsupported activation or head size, or a missing tensor.
        """
        weights = CheckpointWeights(checkpoint, base="model.")
        decoder = _BartDecoder(self, config, weights)
        vocabulary = decoder.build()
        return ModelGraphs(
            encoder=_BartEncoder(self, config, weights).build(),
            decoder=decoder.graph,
            layers=config.decoder_layers,
            shape=decoder.shape,
            vocabulary=vocabulary,
        )


class _BartStack:
    """Base of the encoder and the decoder: the sublayers that both contain."""

    def __init__(
        self, layout: BartLike, config: TransformersConfig, weights: CheckpointWeights, side: Side
    ) -> None:
        self.graph = GraphWriter(side, weights)
        self._layout, self._config, self._side = layout, config, side
        heads = getattr(config, f"{side}_attention_heads")
        self.shape = HeadShape(heads, config.d_model // heads)

    def _embed(self, ids: Value, positions: Value) -> Value:
        graph, side = self.graph, self._side
        name = graph.weights.first(embedding_names(side))
        words = graph.op("Gather", graph.stored(name), ids)
        if self._config.scale_embedding:
            words = graph.op("Mul", words, graph.constant(math.sqrt(self._config.d_model)))
        hidden = graph.op("Add", words, graph.op("Gather", self._positions(), positions))
        if not self._layout.norms_words:
            return hidden
        return graph.layer_norm(hidden, f"{side}.layernorm_embedding", _EPSILON)

    def _positions(self) -> Value:
        """Return the position table without the `offset` rows before the row of the first token."""
        weights, layout, config = self.graph.weights, self._layout, self._config
        name = f"{self._side}.embed_positions.weight"
        rows, width = config.max_position_embeddings, config.d_model
        offset = config.pad_token_id + 1 if layout.offset is None else layout.offset

        def read() -> FloatArray:
            if layout.table is None or name in weights:
                table = weights.read(name)
            else:
                table = layout.table(rows + offset, width)
            return table[offset : offset + rows]

        return self.graph.weight(name, (rows, width), read)

    def _add_residual(self, hidden: Value, norm: str, part: Sublayer) -> Value:
        """Add a sublayer's output to `hidden`. Normalize before the sublayer or after the sum."""
        if self._layout.norms_first:
            return self.graph.op("Add", hidden, part(self._norm(hidden, norm)))
        return self._norm(self.graph.op("Add", hidden, part(hidden)), norm)

    def _norm(self, hidden: Value, name: str) -> Value:
        return self.graph.layer_norm(hidden, name, _EPSILON)

    def _feed_forward(self, layer: str, hidden: Value) -> Value:
        def part(value: Value) -> Value:
            inner = self.graph.linear(value, [f"{layer}.fc1"])
            active = self.graph.activation(inner, self._config.activation_function)
            return self.graph.linear(active, [f"{layer}.fc2"])

        return self._add_residual(hidden, f"{layer}.final_layer_norm", part)

    def _last_norm(self, hidden: Value) -> Value:
        if not self._layout.norms_first:
            return hidden
        return self._norm(hidden, f"{self._side}.layer_norm")


class _BartEncoder(_BartStack):
    def __init__(
        self, layout: BartLike, config: TransformersConfig, weights: CheckpointWeights
    ) -> None:
        super().__init__(layout, config, weights, "encoder")
        self._encoder_inputs = EncoderInputs(self.graph)

    def build(self) -> GraphWriter:
        hidden = self._embed(self._encoder_inputs.ids, self._encoder_inputs.positions())
        for layer in range(self._config.encoder_layers):
            hidden = self._layer(f"encoder.layers.{layer}", hidden)
        states = self._last_norm(hidden)
        heads = self._config.decoder_attention_heads
        shape = HeadShape(heads, self._config.d_model // heads)
        for layer in range(self._config.decoder_layers):
            name = f"decoder.layers.{layer}.encoder_attn"
            projected = [self.graph.linear(states, [f"{name}.{part}_proj"]) for part in "kv"]
            self._encoder_inputs.export_cross_kv(layer, projected, shape)
        return self.graph

    def _layer(self, name: str, hidden: Value) -> Value:
        def attention(value: Value) -> Value:
            attn = f"{name}.self_attn"
            parts = [self.graph.linear(value, [f"{attn}.{part}_proj"]) for part in "qkv"]
            attended = self._encoder_inputs.attend(parts, self.shape, attn)
            return self.graph.linear(attended, [f"{attn}.out_proj"])

        hidden = self._add_residual(hidden, f"{name}.self_attn_layer_norm", attention)
        return self._feed_forward(name, hidden)


class _BartDecoder(_BartStack):
    def __init__(
        self, layout: BartLike, config: TransformersConfig, weights: CheckpointWeights
    ) -> None:
        super().__init__(layout, config, weights, "decoder")
        self._self_inputs = SelfAttentionInputs(self.graph)
        self._cross_inputs = CrossAttentionInputs(self.graph, self._self_inputs.tokens, self.shape)

    def build(self) -> int:
        """Build the decoder and return its vocabulary size."""
        graph = self.graph
        hidden = self._embed(self._self_inputs.ids, self._self_inputs.positions())
        for layer in range(self._config.decoder_layers):
            hidden = self._layer(layer, hidden)
        states = self._last_norm(self._self_inputs.select_logits_positions(hidden))
        logits, vocabulary = graph.head(states, ["lm_head.weight", *embedding_names("decoder")])
        if self._has_logits_bias():
            logits = graph.op("Add", logits, graph.stored("final_logits_bias"))
        graph.output(logits, "logits", "B", "L", vocabulary)
        return vocabulary

    def _has_logits_bias(self) -> bool:
        """Return whether the logits bias has nonzero values. The graph omits a bias of zeros."""
        weights = self.graph.weights
        return "final_logits_bias" in weights and bool(weights.read("final_logits_bias").any())

    def _layer(self, layer: int, hidden: Value) -> Value:
        graph, name = self.graph, f"decoder.layers.{layer}"

        def attention(value: Value) -> Value:
            attn = f"{name}.self_attn"
            modules = [f"{attn}.{part}_proj" for part in "qkv"]
            joined = graph.linear(value, modules, label=f"{attn}.qkv_proj")
            return graph.linear(
                self._self_inputs.attend(layer, [joined], self.shape), [f"{attn}.out_proj"]
            )

        def cross_attention(value: Value) -> Value:
            attn = f"{name}.encoder_attn"
            query = graph.linear(value, [f"{attn}.q_proj"])
            return graph.linear(self._cross_inputs.attend(layer, query), [f"{attn}.out_proj"])

        hidden = self._add_residual(hidden, f"{name}.self_attn_layer_norm", attention)
        hidden = self._add_residual(hidden, f"{name}.encoder_attn_layer_norm", cross_attention)
        return self._feed_forward(name, hidden)


BART = BartLike(norms_first=False, norms_words=True, offset=_FAIRSEQ_OFFSET)
MBART = BartLike(norms_first=True, norms_words=True, offset=_FAIRSEQ_OFFSET)
BLENDERBOT = BartLike(norms_first=True, norms_words=False, offset=0)
MARIAN = BartLike(norms_first=False, norms_words=False, offset=0, table=sinusoids)
PEGASUS = BartLike(norms_first=True, norms_words=False, offset=0, table=sinusoids)
M2M_100 = BartLike(norms_first=True, norms_words=False, offset=None, table=stretched_sinusoids)
