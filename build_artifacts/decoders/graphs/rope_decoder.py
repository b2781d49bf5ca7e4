"""Graph builder for decoders with RoPE, in the variants that `RopeDecoder` describes.

Modules have the names of Llama's in transformers; the checkpoint's names are translated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.architectures import (
    TransformersConfig,
    read_max_positions,
)
from build_artifacts.decoders.graphs.config_flags import (
    ConfigFactor,
    ConfigFlag,
    LayerFlag,
    always,
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
from build_artifacts.decoders.graphs.layer_options import (
    NO_FACTORS,
    NO_LIMITS,
    PRE_NORMS,
    Factors,
    LayerNorms,
    Limits,
)
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.decoders.graphs.recurrent_layers import ApplyRecurrence, RecurrentLayer
from build_artifacts.decoders.graphs.weights import (
    CheckpointWeights,
    FusedModule,
    Renames,
    RowFactors,
)
from build_artifacts.decoders.graphs.xielu import apply_xielu
from build_artifacts.decoders.reference_rope import ReferenceRope
from build_artifacts.errors import UnsupportedModel
from deployments.engines.pytorch.layer_types import list_attention_layers, read_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeDecoder:
    """Variant of the architecture. A call builds the graph of a checkpoint."""

    # Kind of all norms. The weights of "offset rms" are added to 1. A "unit" norm has no weights.
    norm: Literal["rms", "offset rms", "unit rms", "layer", "unit layer"] = "rms"
    epsilon: str | float = "rms_norm_eps"  # of all norms: a config field, or the value
    norms: LayerNorms = PRE_NORMS
    embeddings_norm: str | None = None  # norm before the first layer
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
    has_sinks: bool = False  # whether each head has a score for attention to no token
    has_output_gate: bool = False  # whether the attention's output is multiplied by a gate
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
    unsupported: tuple[str, ...] = ()  # config fields that must be false

    def __call__(self, config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
        """Build the graph of a checkpoint.

        Raises UnsupportedModel for an unsupported activation, head size or option of the variant,
        or a missing tensor.
        """
        for name in self.unsupported:
            if getattr(config, name):
                raise UnsupportedModel(
                    f"`{name}` of the architecture `{config.model_type}` is not supported",
                    hint="use a model of this architecture without it",
                )
        fused = () if self.fused is None else self.fused(config)
        factors = {} if self.weight_factors is None else self.weight_factors(config)
        weights = CheckpointWeights(
            checkpoint, self.base, renames=self.renames, fused=fused, factors=factors
        )
        return _DecoderBuilder(self, config, weights, ReferenceRope(checkpoint)).build()


class _DecoderBuilder:
    """Builder of the graph of one checkpoint."""

    def __init__(
        self,
        variant: RopeDecoder,
        config: TransformersConfig,
        weights: CheckpointWeights,
        rope: ReferenceRope,
    ) -> None:
        self._variant, self._config, self._rope = variant, config, rope
        self._graph = GraphWriter("decoder", weights)
        self._inputs = SelfAttentionInputs(self._graph)
        self._windows = read_windows(config)
        self._attention_layers = list_attention_layers(config)
        self._rope_by_kind: dict[str | None, LayerRope] = {}  # by kind of layer
        self._is_parallel = variant.parallel(config)
        self._query_norm = variant.query_norm if variant.has_query_norm(config) else None
        self._query_factors = self._read_query_factors()
        heads = config.num_attention_heads
        self._shape = HeadShape(
            heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            scale=None if variant.factors.scores is None else variant.factors.scores(config),
            shared_heads=getattr(config, "num_key_value_heads", None) or heads,
        )

    def build(self) -> ModelGraphs:
        graph, config, factors = self._graph, self._config, self._variant.factors
        hidden = graph.op("Gather", graph.stored("embed_tokens.weight"), self._inputs.ids)
        hidden = self._scale(hidden, factors.embeddings)
        if self._variant.embeddings_norm is not None:
            hidden = self._norm(hidden, self._variant.embeddings_norm)
        for layer in range(config.num_hidden_layers):
            hidden = self._layer(layer, hidden)
        states = self._norm(self._inputs.select_logits_positions(hidden), "norm")
        heads = ["lm_head.weight", "embed_tokens.weight"]
        logits, vocabulary = graph.head(
            states, heads[::-1] if config.tie_word_embeddings else heads
        )
        if "lm_head.bias" in graph.weights:
            logits = graph.op("Add", logits, graph.stored("lm_head.bias"))
        logits = self._cap_logits(self._scale(logits, factors.logits))
        graph.output(logits, "logits", "B", "L", vocabulary)
        return ModelGraphs(
            decoder=graph,
            layers=len(self._attention_layers),
            shape=self._shape,
            vocabulary=vocabulary,
        )

    def _layer(self, number: int, hidden: Value) -> Value:
        graph, norms, layer = self._graph, self._variant.norms, f"layers.{number}"
        factor = self._variant.factors.layers
        source = self._optional_norm(hidden, layer, norms.before_attention)
        attended = self._attention_or_recurrence(number, source)
        attended = self._optional_norm(attended, layer, norms.after_attention)
        summed = graph.op("Add", hidden, self._scale(attended, factor))
        if not self._is_parallel:
            source = self._optional_norm(summed, layer, norms.before_mlp)
        elif norms.before_mlp != norms.before_attention:
            source = self._optional_norm(hidden, layer, norms.before_mlp)
        computed = self._mlp_or_experts(number, source)
        computed = self._optional_norm(computed, layer, norms.after_mlp)
        return graph.op("Add", summed, self._scale(computed, factor))

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
        graph, variant, shape = self._graph, self._variant, self._shape
        name, rope = f"layers.{number}.self_attn", self._layer_rope(number)
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
        options = AttentionOptions(
            rope=inside, window=self._windows[number], sinks=sinks, softcap=softcap
        )
        cached = self._attention_layers.index(number)
        attended = self._inputs.attend(cached, parts, shape, options)
        if variant.has_output_gate:
            gate = graph.op("Sigmoid", graph.linear(hidden, [f"{name}.output_gate"]))
            attended = graph.op("Mul", attended, gate)
        return graph.linear(attended, [f"{name}.o_proj"])

    def _read_query_factors(self) -> Value | None:
        """Read the factors of the queries at the positions of all tokens, [B, T, 1]."""
        compute, graph = self._variant.factors.queries, self._graph
        if compute is None:
            return None
        # A table, because operators such as Log may round differently for other numbers of tokens.
        table = compute(self._config, self._list_positions())
        # Quantizers replace matrices only, so the table has one axis.
        by_position = graph.tensor("query_factors", table)
        factors = graph.op("Gather", by_position, self._inputs.positions())
        return graph.op("Unsqueeze", factors, graph.constant([-1]))

    def _list_positions(self) -> NDArray[np.int64]:
        positions = read_max_positions(self._config)
        assert positions is not None, "bug: a config without a maximum of positions"
        return np.arange(positions)

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
        """Return the RoPE of a layer. Layers of one kind share tables."""
        if not self._variant.has_rope(self._config, number):
            return None
        kind, turns_back = self._rope.kind(number), self._variant.turns_back
        if kind not in self._rope_by_kind:
            cosines, sines = self._rope.compute_tables(kind, self._list_positions())
            self._rope_by_kind[kind] = LayerRope(
                self._graph.tensor(f"rope.{kind}.cosines", cosines),
                self._graph.tensor(f"rope.{kind}.sines", -sines if turns_back else sines),
                channels=2 * cosines.shape[1],
                interleaved=self._variant.interleaved,
            )
        return self._rope_by_kind[kind]

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

    def _cap_logits(self, logits: Value) -> Value:
        limit, graph = self._read_limit(self._variant.limits.logits), self._graph
        if limit is None:
            return logits
        capped = graph.op("Tanh", graph.op("Div", logits, graph.constant(limit)))
        return graph.op("Mul", capped, graph.constant(limit))

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
        # Each norm has its own ones, so that a quantizer may smooth its output.
        ones = graph.tensor(name, np.ones(size or self._config.hidden_size, np.float32))
        if kind == "unit rms":
            return graph.rms_norm(value, ones, epsilon)
        return graph.op("LayerNormalization", value, ones, axis=-1, epsilon=epsilon)
