"""Graph builder for Gemma 4: heads of two sizes, shared keys and values, inputs of each layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.graph import GraphWriter
from build_artifacts.decoders.graphs.kv_inputs import (
    AttentionOptions,
    HeadShape,
    ModelGraphs,
    SelfAttentionInputs,
)
from build_artifacts.decoders.graphs.layer_ropes import LayerRopes
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.decoders.graphs.weights import CheckpointWeights
from build_artifacts.errors import UnsupportedModel
from deployments.engines.layer_types import GLOBAL_LAYER, read_windows


def build_gemma4(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of a Gemma 4 without experts.

    Raises UnsupportedModel for experts, bidirectional attention, an unsupported activation or head
    size, or a missing tensor.
    """
    if getattr(config, "enable_moe_block", False):
        raise UnsupportedModel(
            "Gemma 4 with mixtures of experts cannot be built",
            hint="ONNX Runtime has no experts with GELU; E2B, E4B and 31B have no experts",
        )
    if config.use_bidirectional_attention == "all":
        raise UnsupportedModel(
            "this Gemma 4 has bidirectional attention, so it does not generate text",
            hint="use a checkpoint with causal attention",
        )
    return Gemma4Builder(config, checkpoint).build()


class Gemma4Builder:
    """Builder of the graph of one checkpoint."""

    def __init__(self, config: TransformersConfig, checkpoint: Path) -> None:
        self._config = config
        self._weights = CheckpointWeights(checkpoint, "model.")
        self._graph = GraphWriter("decoder", self._weights)
        # Size of the inputs that each layer has besides the hidden states; 0 without them. The
        # config of the 12B model does not declare it.
        self._input_size: int = getattr(config, "hidden_size_per_layer_input", 0)
        self._inputs = SelfAttentionInputs(self._graph)
        self._windows = read_windows(config)
        self._ropes = LayerRopes(self._graph, config, checkpoint)
        # The last layer of each type with keys and values of its own, which later ones read.
        self._owners: dict[str, int] = {}

    def build(self) -> ModelGraphs:
        hidden = self._embed()
        context = self._project_layer_inputs(hidden)
        for layer in range(self._config.num_hidden_layers):
            hidden = self._layer(layer, hidden, context)
        return self._finish(hidden)

    def _embed(self) -> Value:
        """Return the input of the first layer, [B, T, D]."""
        graph = self._graph
        embedded = graph.op("Gather", graph.stored("embed_tokens.weight"), self._inputs.ids)
        return self._scale(embedded, self._config.hidden_size**0.5)

    def _finish(self, hidden: Value) -> ModelGraphs:
        """Compute the logits from the output of the last layer, [B, T, D]."""
        graph, config = self._graph, self._config
        states = self._norm(self._inputs.select_logits_positions(hidden), "norm")
        logits, vocabulary = graph.decoder_head(states, is_tied=config.tie_word_embeddings)
        if (cap := config.final_logit_softcapping) is not None:
            logits = graph.soft_cap(logits, float(cap))
        graph.output(logits, "logits", "B", "L", vocabulary)
        return ModelGraphs(
            decoder=graph,
            layers=config.num_hidden_layers - config.num_kv_shared_layers,
            shape=max(map(self._shape, range(config.num_hidden_layers)), key=lambda s: s.size),
            vocabulary=vocabulary,
        )

    def _shape(self, layer: int) -> HeadShape:
        own = self._config.per_layer_config[layer]
        heads = self._config.num_attention_heads
        return HeadShape(heads, own.head_dim, scale=1.0, shared_heads=own.num_key_value_heads)

    def _layer(self, number: int, hidden: Value, context: Value | None) -> Value:
        graph, layer = self._graph, f"layers.{number}"
        attended = self._attention(number, self._norm(hidden, f"{layer}.input_layernorm"))
        hidden = self._add(hidden, attended, f"{layer}.post_attention_layernorm")
        source = self._norm(hidden, f"{layer}.pre_feedforward_layernorm")
        gate = self._activate(graph.linear(source, [f"{layer}.mlp.gate_proj"]))
        inner = graph.op("Mul", gate, graph.linear(source, [f"{layer}.mlp.up_proj"]))
        computed = graph.linear(inner, [f"{layer}.mlp.down_proj"])
        hidden = self._add(hidden, computed, f"{layer}.post_feedforward_layernorm")
        if context is not None:
            hidden = graph.op("Add", hidden, self._compute_layer_input(number, hidden, context))
        return graph.op("Mul", hidden, graph.stored(f"{layer}.layer_scalar"))

    def _compute_layer_input(self, number: int, hidden: Value, context: Value) -> Value:
        """Return what a layer adds for its own input, [B, T, D]."""
        graph, layer = self._graph, f"layers.{number}"
        gate = self._activate(graph.linear(hidden, [f"{layer}.per_layer_input_gate"]))
        inner = graph.op("Mul", gate, self._layer_input(number, context))
        computed = graph.linear(inner, [f"{layer}.per_layer_projection"])
        return self._norm(computed, f"{layer}.post_per_layer_input_norm")

    def _attention(self, number: int, hidden: Value) -> Value:
        graph, name, shape = self._graph, f"layers.{number}.self_attn", self._shape(number)
        kind, window, rope = (
            self._config.layer_types[number],
            self._windows[number],
            self._ropes.of(number),
        )
        query = self._norm_heads(graph.linear(hidden, [f"{name}.q_proj"]), shape, f"{name}.q_norm")
        query = self._inputs.apply_rope(query, rope, shape.heads)
        if number >= self._config.num_hidden_layers - self._config.num_kv_shared_layers:
            attended = self._inputs.attend_to_layer(
                self._owners[kind],
                query,
                shape,
                window=window,
                name=f"self_attention.{number}",
            )
            return graph.linear(attended, [f"{name}.o_proj"])
        self._owners[kind] = number
        keys = graph.linear(hidden, [f"{name}.k_proj"])
        values = keys if self._has_equal_keys(kind) else graph.linear(hidden, [f"{name}.v_proj"])
        keys = self._norm_heads(keys, shape, f"{name}.k_norm")
        keys = self._inputs.apply_rope(keys, rope, shape.kv_heads)
        parts = [query, keys, self._norm_heads(values, shape)]
        attended = self._inputs.attend(number, parts, shape, AttentionOptions(window=window))
        return graph.linear(attended, [f"{name}.o_proj"])

    def _has_equal_keys(self, kind: str) -> bool:
        """Return whether the keys of layers of a kind are values, too, before their norms."""
        return bool(self._config.attention_k_eq_v and kind == GLOBAL_LAYER)

    def _norm_heads(self, value: Value, shape: HeadShape, module: str | None = None) -> Value:
        """Norm each head of [B, T, heads x size], without weights if no `module` is given."""
        graph = self._graph
        apart = graph.op("Reshape", value, graph.constant([0, 0, -1, shape.size]))
        if module is not None:
            normed = self._norm(apart, module)
        else:
            ones = graph.constant(np.ones(shape.size, np.float32))
            normed = graph.rms_norm(apart, ones, self._config.rms_norm_eps)
        return graph.op("Reshape", normed, graph.constant([0, 0, -1]))

    def _project_layer_inputs(self, embedded: Value) -> Value | None:
        """Return what the inputs of the layers have of the token vectors, [B, T, layers, width]."""
        graph, config = self._graph, self._config
        if not self._input_size:
            return None
        projected = graph.linear(embedded, ["per_layer_model_projection"])
        projected = self._scale(projected, config.hidden_size**-0.5)
        apart = graph.op("Reshape", projected, graph.constant([0, 0, -1, self._input_size]))
        return self._norm(apart, "per_layer_projection_norm")

    def _layer_input(self, number: int, context: Value) -> Value:
        """Return the input of one layer besides the hidden states, [B, T, width].

        The checkpoint has one table for all layers. The graph has one per layer, because their
        sizes would otherwise share a scale in int8.
        """
        graph, table = self._graph, "embed_tokens_per_layer.weight"
        width = self._input_size
        columns = slice(number * width, (number + 1) * width)
        rows = self._weights.shape(table)[0]
        own = graph.weight(
            f"{table}.{number}", (rows, width), lambda: self._weights.read_columns(table, columns)
        )
        of_token = self._scale(graph.op("Gather", own, self._layer_ids()), width**0.5)
        of_context = graph.op("Gather", context, graph.constant(number), axis=2)
        return self._scale(graph.op("Add", of_context, of_token), 2**-0.5)

    def _layer_ids(self) -> Value:
        """Return the rows of the tokens in the table of the layers, [B, T]."""
        return self._inputs.ids

    def _add(self, hidden: Value, computed: Value, norm: str) -> Value:
        return self._graph.op("Add", hidden, self._norm(computed, norm))

    def _activate(self, value: Value) -> Value:
        return self._graph.activation(value, self._config.hidden_activation)

    def _norm(self, value: Value, module: str) -> Value:
        weight = self._graph.stored(f"{module}.weight")
        return self._graph.rms_norm(value, weight, self._config.rms_norm_eps)

    def _scale(self, value: Value, factor: float) -> Value:
        return self._graph.op("Mul", value, self._graph.constant(float(factor)))
