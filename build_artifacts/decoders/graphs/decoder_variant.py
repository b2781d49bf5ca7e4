"""Graph builder for decoders, in the variants that `DecoderVariant` describes.

Modules have the names of Llama's in transformers; the checkpoint's names are translated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from build_artifacts.checkpoints.architectures import (
    TransformersConfig,
    read_head_size,
    read_kv_heads,
)
from build_artifacts.decoders.graphs.alibi import BuildBias
from build_artifacts.decoders.graphs.config_flags import (
    ConfigFactor,
    ConfigFlag,
    LayerFlag,
    always,
    check_options,
    everywhere,
    never,
    read_activation,
)
from build_artifacts.decoders.graphs.experts import ExpertLayer, Experts
from build_artifacts.decoders.graphs.graph import GraphWriter
from build_artifacts.decoders.graphs.kv_inputs import (
    AttentionOptions,
    HeadShape,
    LayerRope,
    ModelGraphs,
    SelfAttentionInputs,
)
from build_artifacts.decoders.graphs.latent_attention import LatentAttention
from build_artifacts.decoders.graphs.layer_options import (
    NO_FACTORS,
    NO_LIMITS,
    PRE_NORMS,
    Factors,
    LayerNorms,
    Limits,
    TokenPositions,
)
from build_artifacts.decoders.graphs.layer_ropes import LayerRopes, list_positions
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.decoders.graphs.output_gate import apply_gate
from build_artifacts.decoders.graphs.recurrent_layers import ApplyRecurrence, RecurrentLayer
from build_artifacts.decoders.graphs.weights import (
    CheckpointWeights,
    FusedModule,
    Renames,
    RowFactors,
)
from build_artifacts.decoders.graphs.xielu import apply_xielu
from deployments.engines.layer_types import list_attention_layers, read_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderVariant:
    """Differences of an architecture to Llama. A call builds the graph of a checkpoint."""

    # Kind of all norms. The weights of "offset rms" are added to 1. A "unit" norm has no weights.
    norm: Literal["rms", "offset rms", "unit rms", "layer", "unit layer"] = "rms"
    # Config field with the epsilon of all norms, or the epsilon itself.
    epsilon: str | float = "rms_norm_eps"
    norms: LayerNorms = PRE_NORMS
    recurrent_norms: LayerNorms | None = None  # of layers without attention; None: the same
    has_embeddings_norm: bool = False  # whether a norm precedes the first layer
    has_last_norm: ConfigFlag = always  # whether a norm follows the last layer
    # Norms of queries and keys, over all heads or over each of them.
    query_norm: Literal["all heads", "each head"] | None = None
    has_query_norm: ConfigFlag = always  # whether a model of the variant has these norms
    rope_before_norm: bool = False  # whether RoPE comes before these norms, instead of after them
    # Whether attention and MLP both read the input of the layer. Otherwise the MLP reads the result
    # of the attention.
    parallel: ConfigFlag = never
    gated: bool = True  # whether the MLP multiplies by a gate
    has_rope: LayerFlag = everywhere
    interleaved: bool = False  # whether RoPE pairs neighboring channels, instead of the halves
    turns_back: bool = False  # whether RoPE rotates pairs in the opposite direction
    alibi: BuildBias | None = None  # builds a bias of the scores that depends on the positions
    positions: TokenPositions | None = None
    # Whether embeddings have another size than layers, so that linear layers project both ways.
    has_projections: ConfigFlag = never
    has_sinks: bool = False  # whether each head has a score for attention to no token
    has_latents: bool = False  # whether keys and values of all heads come from one vector
    # Whether the attention's output is multiplied by gates, one per channel or one per head.
    has_output_gate: ConfigFlag = never
    recurrent: ApplyRecurrence | None = None  # what layers without attention have instead
    # Whether layers have both attention and the recurrent module, whose results are added.
    has_both: bool = False
    factors: Factors = NO_FACTORS
    # Factors that linear layers absorb in the graph.
    weight_factors: Callable[[TransformersConfig], RowFactors] | None = None
    limits: Limits = NO_LIMITS
    experts: Experts | None = None  # None: layers have an MLP each
    base: str = "model."
    renames: Renames = ()
    fused: Callable[[TransformersConfig], Sequence[FusedModule]] | None = None
    transposed: tuple[str, ...] = ()  # modules whose weights checkpoints have as [in, out]
    # Config fields and their only supported values. None, false and 0 are the same.
    only: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
        """Build the graph of a checkpoint.

        Raises UnsupportedModel for an unsupported activation, head size or option of the variant,
        or a missing tensor.
        """
        check_options(config, self.only)
        weights = CheckpointWeights(
            checkpoint,
            self.base,
            renames=self.renames,
            fused=() if self.fused is None else self.fused(config),
            transposed=self.transposed,
            factors={} if self.weight_factors is None else self.weight_factors(config),
        )
        return _DecoderBuilder(self, config, weights, checkpoint).build()


class _DecoderBuilder:
    """Builder of the graph of one checkpoint."""

    def __init__(
        self,
        variant: DecoderVariant,
        config: TransformersConfig,
        weights: CheckpointWeights,
        checkpoint: Path,
    ) -> None:
        self._variant, self._config = variant, config
        self._graph = GraphWriter("decoder", weights)
        self._inputs = SelfAttentionInputs(self._graph)
        self._windows = read_windows(config)
        self._attention_layers = list_attention_layers(config)
        self._ropes = LayerRopes(
            self._graph,
            config,
            checkpoint,
            interleaved=variant.interleaved,
            turns_back=variant.turns_back,
        )
        self._is_parallel = variant.parallel(config)
        self._query_norm = variant.query_norm if variant.has_query_norm(config) else None
        self._query_factors = self._read_query_factors()
        self._shape = HeadShape(
            config.num_attention_heads,
            read_head_size(config),
            shared_heads=read_kv_heads(config),
        )
        build_bias = variant.alibi
        # Built once: it depends on positions, not on the layer.
        self._bias = None if build_bias is None else build_bias(self._graph, self._inputs, config)

    def build(self) -> ModelGraphs:
        graph, config, factors = self._graph, self._config, self._variant.factors
        hidden = self._embed()
        for layer in range(config.num_hidden_layers):
            hidden = self._layer(layer, hidden)
        states = self._inputs.select_logits_positions(hidden)
        if self._variant.has_last_norm(config):
            states = self._norm(states, "norm")
        if self._variant.has_projections(config):
            states = graph.linear(states, ["project_out"])
        logits, vocabulary = graph.decoder_head(states, is_tied=config.tie_word_embeddings)
        if "lm_head.bias" in graph.weights:
            logits = graph.op("Add", logits, graph.stored("lm_head.bias"))
        logits = self._scale(logits, factors.logits)
        if (cap := self._read_limit(self._variant.limits.logits)) is not None:
            logits = graph.soft_cap(logits, cap)
        graph.output(logits, "logits", "B", "L", vocabulary)
        return ModelGraphs(
            decoder=graph,
            layers=len(self._attention_layers),
            shape=self._shape,
            vocabulary=vocabulary,
        )

    def _embed(self) -> Value:
        """Return the input of the first layer, [B, T, D]."""
        graph, variant = self._graph, self._variant
        hidden = graph.op("Gather", graph.stored("embed_tokens.weight"), self._inputs.ids)
        hidden = self._scale(hidden, variant.factors.embeddings)
        if variant.has_projections(self._config):
            hidden = graph.linear(hidden, ["project_in"])
        if variant.positions is not None:
            hidden = graph.op("Add", hidden, self._embed_positions(variant.positions))
        return self._norm(hidden, "embed_norm") if variant.has_embeddings_norm else hidden

    def _embed_positions(self, positions: TokenPositions) -> Value:
        """Return the rows of the tokens, [B, T, D]."""
        graph, name = self._graph, "embed_positions.weight"
        rows = self._inputs.positions()
        if positions.first:
            rows = graph.op("Add", rows, graph.constant(positions.first))
        if positions.compute is None:
            table = graph.stored(name)
        else:
            table = graph.tensor(name, positions.compute(self._config))
        return graph.op("Gather", table, rows)

    def _layer(self, number: int, hidden: Value) -> Value:
        norms, layer = self._variant.norms, f"layers.{number}"
        if number not in self._attention_layers:
            norms = self._variant.recurrent_norms or norms
        source = self._optional_norm(hidden, layer, norms.before_attention)
        attended = self._attention_or_recurrence(number, source)
        summed = self._add(hidden, attended, layer, norms.after_attention)
        if not self._is_parallel:
            source = self._optional_norm(summed, layer, norms.before_mlp)
        elif norms.before_mlp != norms.before_attention:
            source = self._optional_norm(hidden, layer, norms.before_mlp)
        computed = self._mlp_or_experts(number, source)
        return self._add(summed, computed, layer, norms.after_mlp)

    def _add(self, hidden: Value, part: Value, layer: str, norm: str | None) -> Value:
        """Add the output of attention or MLP to `hidden`, with the norm after it, if any."""
        variant = self._variant
        if not variant.norms.after_sums:
            part = self._optional_norm(part, layer, norm)
        summed = self._graph.op("Add", hidden, self._scale(part, variant.factors.layers))
        return self._optional_norm(summed, layer, norm) if variant.norms.after_sums else summed

    def _attention_or_recurrence(self, number: int, hidden: Value) -> Value:
        has_attention, has_both = number in self._attention_layers, self._variant.has_both
        if has_attention and not has_both:
            return self._attention(number, hidden)
        apply = self._variant.recurrent
        assert apply is not None, "bug: a layer without attention in a variant that has none"
        layer = RecurrentLayer(self._graph, self._config, f"layers.{number}", number)
        computed = apply(layer, hidden)
        if has_both:
            computed = self._graph.op("Add", computed, self._attention(number, hidden))
        return computed

    def _attention(self, number: int, hidden: Value) -> Value:
        graph, variant, shape = self._graph, self._variant, self._layer_shape(number)
        name, rope = f"layers.{number}.self_attn", self._layer_rope(number)
        cached = self._attention_layers.index(number)
        if variant.has_latents:
            assert rope is not None, "bug: latent attention without RoPE"
            latent = LatentAttention(graph, self._inputs, self._config, name, shape)
            return graph.linear(latent.attend(cached, hidden, rope), [f"{name}.o_proj"])
        modules = [f"{name}.{part}_proj" for part in "qkv"]
        outside, inside = None, rope  # what precedes the attention node, and what it applies itself
        if rope and (variant.rope_before_norm or not rope.fits_attention(shape)):
            outside, inside = rope, None
        if self._query_norm is None and outside is None and self._query_factors is None:
            parts = [self._clip(graph.linear(hidden, modules, label=f"{name}.qkv_proj"))]
        else:
            query, key, value = (self._clip(graph.linear(hidden, [module])) for module in modules)
            parts = [
                self._norm_and_rope(query, f"{name}.q_norm", shape.heads, outside),
                self._norm_and_rope(key, f"{name}.k_norm", shape.kv_heads, outside),
                value,
            ]
            if self._query_factors is not None:
                parts[0] = graph.op("Mul", parts[0], self._query_factors)
        sinks = graph.stored(f"{name}.sinks") if variant.has_sinks else None
        softcap = self._read_limit(variant.limits.scores)
        options = AttentionOptions(self._bias, inside, self._windows[number], sinks, softcap)
        attended = self._inputs.attend(cached, parts, shape, options)
        if variant.has_output_gate(self._config):
            attended = apply_gate(graph, attended, hidden, f"{name}.output_gate", shape)
        return graph.linear(attended, [f"{name}.o_proj"])

    def _read_query_factors(self) -> Value | None:
        """Read the factors of the queries at the positions of all tokens, [B, T, 1]."""
        compute, graph = self._variant.factors.queries, self._graph
        if compute is None:
            return None
        # A table, because operators such as Log may round differently for other numbers of tokens.
        table = compute(self._config, list_positions(self._config))
        # Quantizers replace matrices only, so the table has one axis.
        by_position = graph.tensor("query_factors", table)
        factors = graph.op("Gather", by_position, self._inputs.positions())
        return graph.op("Unsqueeze", factors, graph.constant([-1]))

    def _layer_shape(self, number: int) -> HeadShape:
        factor = self._variant.factors.scores
        scale = None if factor is None else factor(self._config, number)
        return replace(self._shape, scale=scale)

    def _norm_and_rope(self, value: Value, norm: str, heads: int, rope: LayerRope | None) -> Value:
        """Apply the norm of the variant, if any, and `rope` to queries or keys.

        The shape is [B, T, heads x size].
        """
        if rope is not None and self._variant.rope_before_norm:
            value = self._inputs.apply_rope(value, rope, heads)
        if self._query_norm is not None:
            value = self._norm_heads(value, norm, heads)
        if rope is not None and not self._variant.rope_before_norm:
            value = self._inputs.apply_rope(value, rope, heads)
        return value

    def _norm_heads(self, value: Value, module: str, heads: int) -> Value:
        """Norm queries or keys, [B, T, heads x size]."""
        if self._query_norm == "all heads":
            return self._norm(value, module)
        graph = self._graph
        apart = graph.op("Reshape", value, graph.constant([0, 0, heads, self._shape.size]))
        normed = self._norm(apart, module, self._shape.size)
        return graph.op("Reshape", normed, graph.constant([0, 0, -1]))

    def _layer_rope(self, number: int) -> LayerRope | None:
        if not self._variant.has_rope(self._config, number):
            return None
        return self._ropes.of(number)

    def _mlp_or_experts(self, number: int, hidden: Value) -> Value:
        """Apply the MLP of a layer, or its mixture of experts if the checkpoint has a router."""
        graph, name, experts = self._graph, f"layers.{number}.mlp", self._variant.experts
        if experts is None or f"{name}.gate.weight" not in graph.weights:
            return self._mlp(name, hidden)
        layer = ExpertLayer(graph, self._config, experts, name, number)
        computed, shared = layer.apply(hidden), f"{name}.shared_expert"
        if f"{shared}.up_proj.weight" not in graph.weights:
            return computed
        added = self._mlp(shared, hidden)
        if f"{shared}_gate.weight" in graph.weights:
            share = graph.op("Sigmoid", graph.linear(hidden, [f"{shared}_gate"]))
            added = graph.op("Mul", added, share)
        return graph.op("Add", computed, added)

    def _mlp(self, name: str, hidden: Value) -> Value:
        graph, activation = self._graph, read_activation(self._config)
        if not self._variant.gated:
            inner = graph.linear(hidden, [f"{name}.up_proj"])
            if activation == "xielu":
                inner = apply_xielu(graph, inner, f"{name}.act_fn")
            else:
                inner = graph.activation(inner, activation)
        else:
            gate = graph.activation(graph.linear(hidden, [f"{name}.gate_proj"]), activation)
            inner = graph.op("Mul", gate, graph.linear(hidden, [f"{name}.up_proj"]))
        return graph.linear(inner, [f"{name}.down_proj"])

    def _scale(self, value: Value, factor: ConfigFactor | None) -> Value:
        if factor is None:
            return value
        return self._graph.op("Mul", value, self._graph.constant(float(factor(self._config))))

    def _read_limit(self, field: str | None) -> float | None:
        """Return the limit in a config field, None without one."""
        limit = None if field is None else getattr(self._config, field)
        return None if limit is None else float(limit)

    def _clip(self, value: Value) -> Value:
        limit = self._read_limit(self._variant.limits.projections)
        if limit is None:
            return value
        return self._graph.op("Clip", value, *map(self._graph.constant, (-limit, limit)))

    def _optional_norm(self, value: Value, layer: str, module: str | None) -> Value:
        return value if module is None else self._norm(value, f"{layer}.{module}")

    def _norm(self, value: Value, module: str, size: int | None = None) -> Value:
        """Apply a norm over the last axis, with `size` channels (None: the hidden size)."""
        graph, name, kind = self._graph, f"{module}.weight", self._variant.norm
        epsilon = self._variant.epsilon
        if isinstance(epsilon, str):
            epsilon = getattr(self._config, epsilon)
        if kind == "layer":
            return graph.layer_norm(value, module, epsilon)
        if kind == "rms":
            return graph.rms_norm(value, graph.stored(name), epsilon)
        if kind == "offset rms":
            scale = graph.weight(
                f"{name}.offset", graph.weights.shape(name), lambda: 1 + graph.weights.read(name)
            )
            return graph.rms_norm(value, scale, epsilon)
        # Ones for each norm, not one tensor for all: a quantizer scales channels by changing them.
        ones = graph.tensor(name, np.ones(size or self._config.hidden_size, np.float32))
        if kind == "unit rms":
            return graph.rms_norm(value, ones, epsilon)
        return graph.op("LayerNormalization", value, ones, axis=-1, epsilon=epsilon)
