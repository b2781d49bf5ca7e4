"""Multi-head latent attention: keys and values of all heads come from one small vector per token.

The KV cache has the keys and values of each head, as for other models: the attention operator has
no latent form. A head is the channels with RoPE, then those without; values get zeros up to the
size of keys. Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434
"""

from __future__ import annotations

import math
from typing import NamedTuple

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.graph import GraphWriter
from build_artifacts.decoders.graphs.kv_inputs import (
    AttentionOptions,
    HeadShape,
    LayerRope,
    SelfAttentionInputs,
)
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.decoders.graphs.weights import FusedModule

_EPSILON = 1e-6  # of the norms of latent vectors, whatever the config has for others


def list_latent_modules(config: TransformersConfig) -> list[FusedModule]:
    """Describe the modules that compute channels with and without RoPE, or keys and values."""
    heads, rope = config.num_attention_heads, config.qk_rope_head_dim
    plain, values = config.qk_nope_head_dim, config.v_head_dim
    queries = "self_attn.q_proj" if config.q_lora_rank is None else "self_attn.q_b_proj"
    return [
        FusedModule(queries, ("self_attn.q_plain", "self_attn.q_rope"), heads, (plain, rope)),
        FusedModule(
            "self_attn.kv_a_proj_with_mqa",
            ("self_attn.kv_latent", "self_attn.k_rope"),
            shares=(config.kv_lora_rank, rope),
        ),
        FusedModule(
            "self_attn.kv_b_proj",
            ("self_attn.k_plain", "self_attn.values"),
            heads,
            (plain, values),
        ),
    ]


def compute_latent_scale(config: TransformersConfig, _: int) -> float:
    """Return the factor of the scores. YaRN changes it if the config states `mscale_all_dim`."""
    rope, scale = config.rope_parameters, config.qk_head_dim**-0.5
    if rope.get("rope_type", "default") != "default" and (share := rope.get("mscale_all_dim")):
        scale *= (0.1 * share * math.log(max(rope["factor"], 1)) + 1) ** 2
    return float(scale)


class LatentAttention(NamedTuple):
    """Latent attention of one layer."""

    graph: GraphWriter
    inputs: SelfAttentionInputs
    config: TransformersConfig
    name: str  # of the module
    shape: HeadShape

    def attend(self, cached: int, hidden: Value, rope: LayerRope) -> Value:
        """Attend with the KV cache `cached`: [B, T, D] -> [B, T, heads x size of values]."""
        heads = self.shape.heads
        source = hidden
        if self.config.q_lora_rank is not None:
            source = self._norm(self._linear(hidden, "q_a_proj"), "q_a_layernorm")
        query = self._join(
            self.inputs.apply_rope(self._linear(source, "q_rope"), rope, heads),
            self._linear(source, "q_plain"),
        )
        latent = self._norm(self._linear(hidden, "kv_latent"), "kv_a_layernorm")
        rotated = self.inputs.apply_rope(self._linear(hidden, "k_rope"), rope, 1)
        repeated = self.graph.op("Tile", rotated, self.graph.constant([1, 1, heads]))
        key = self._join(repeated, self._linear(latent, "k_plain"))
        parts = [query, key, self._fill(self._linear(latent, "values"))]
        attended = self.inputs.attend(cached, parts, self.shape, AttentionOptions())
        return self._cut(attended)

    def _linear(self, value: Value, module: str) -> Value:
        return self.graph.linear(value, [f"{self.name}.{module}"])

    def _norm(self, value: Value, module: str) -> Value:
        weight = self.graph.stored(f"{self.name}.{module}.weight")
        return self.graph.rms_norm(value, weight, _EPSILON)

    def _join(self, rotated: Value, plain: Value) -> Value:
        """Join the channels of each head: [B, T, heads x a], [B, T, heads x b] -> [B, T, ..]."""
        joined = self.graph.op("Concat", *map(self._split_heads, (rotated, plain)), axis=-1)
        return self._join_heads(joined)

    def _fill(self, values: Value) -> Value:
        """Add zeros to each head of the values, up to the size of keys."""
        missing = self.shape.size - self.config.v_head_dim
        if not missing:
            return values
        ends = self.graph.constant([0] * 7 + [missing])
        return self._join_heads(self.graph.op("Pad", self._split_heads(values), ends))

    def _cut(self, attended: Value) -> Value:
        """Remove the channels that `_fill` added, from the attended values."""
        size = self.config.v_head_dim
        if size == self.shape.size:
            return attended
        bounds = map(self.graph.constant, ([0], [size], [-1]))
        return self._join_heads(self.graph.op("Slice", self._split_heads(attended), *bounds))

    def _split_heads(self, value: Value) -> Value:
        return self.graph.op("Reshape", value, self.graph.constant([0, 0, self.shape.heads, -1]))

    def _join_heads(self, value: Value) -> Value:
        return self.graph.op("Reshape", value, self.graph.constant([0, 0, -1]))
