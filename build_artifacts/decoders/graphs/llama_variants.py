"""Variants of decoders like Llama, by model family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.config_flags import always
from build_artifacts.decoders.graphs.decoder_variant import (
    POST_NORMS,
    SHARED_NORM,
    DecoderVariant,
    Factors,
    LayerNorms,
)
from build_artifacts.decoders.graphs.experts import Experts
from build_artifacts.decoders.graphs.kv_inputs import ModelGraphs
from build_artifacts.decoders.graphs.recurrent_layers import (
    apply_gated_delta_net,
    apply_mamba2,
    apply_short_convolution,
)
from build_artifacts.decoders.graphs.weights import FusedModule
from deployments.engines.pytorch.layer_types import read_windows


def _normalizes_experts(config: TransformersConfig) -> bool:
    return bool(config.norm_topk_prob)


def _has_window(config: TransformersConfig, layer: int) -> bool:
    return read_windows(config)[layer] is not None


def _is_listed(config: TransformersConfig, layer: int) -> bool:
    return bool(config.no_rope_layers[layer])  # the field lists 1 for layers with RoPE


def _has_window_if_any(config: TransformersConfig, layer: int) -> bool:
    return config.sliding_window is None or _has_window(config, layer)


def _glm_gate(_: TransformersConfig) -> FusedModule:
    return FusedModule("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))


def _gated_queries(config: TransformersConfig) -> FusedModule:
    parts = ("self_attn.q_proj", "self_attn.output_gate")
    return FusedModule("self_attn.q_proj", parts, groups=config.num_attention_heads)


def _shared_gate(_: TransformersConfig) -> FusedModule:
    gate, up = "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"
    return FusedModule("mlp.shared_expert.gate_up_proj", (gate, up))


def _has_positions(config: TransformersConfig, _: int) -> bool:
    return bool(config.position_embedding_type == "rope")


def _has_query_norm(config: TransformersConfig) -> bool:
    return bool(config.use_qk_norm)


LLAMA = DecoderVariant()
QWEN3 = DecoderVariant(query_norm="each head")
SMOLLM3 = DecoderVariant(has_rope=_is_listed)
ARCEE = DecoderVariant(gated=False)
HELIUM = DecoderVariant(interleaved=True)
HUNYUAN = DecoderVariant(
    query_norm="each head",
    rope_before_norm=True,
    renames=(("query_layernorm", "q_norm"), ("key_layernorm", "k_norm")),
)
OLMO2 = DecoderVariant(norms=POST_NORMS, query_norm="all heads")
EXAONE4 = DecoderVariant(norms=POST_NORMS, query_norm="each head", has_rope=_has_window_if_any)
COHERE = DecoderVariant(
    norm="layer",
    epsilon="layer_norm_eps",
    norms=SHARED_NORM,
    parallel=always,
    interleaved=True,
    factors=Factors(logits=lambda config: config.logit_scale),
    only={"use_qk_norm": False},
)
COHERE2 = replace(COHERE, has_rope=_has_window, only={})
STABLELM = DecoderVariant(
    norm="layer",
    epsilon="layer_norm_eps",
    only={"qk_layernorm": False, "use_parallel_residual": False},
)
STARCODER2 = DecoderVariant(
    norm="layer",
    epsilon="norm_epsilon",
    gated=False,
    renames=(("mlp.c_fc", "mlp.up_proj"), ("mlp.c_proj", "mlp.down_proj")),
)
GLM = DecoderVariant(interleaved=True, fused=_glm_gate)
GLM4 = DecoderVariant(
    norms=LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    interleaved=True,
    fused=_glm_gate,
)

_SHARED_EXPERTS = ("shared_experts", "shared_expert")
_PROBABILITIES = Experts(normalized=_normalizes_experts)
_SIGMOIDS = Experts(
    normalized=_normalizes_experts, corrected="Sigmoid", factor="routed_scaling_factor"
)
MIXTRAL = DecoderVariant(
    experts=Experts(),
    renames=(
        ("block_sparse_moe", "mlp"),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    ),
)
QWEN2_MOE = DecoderVariant(experts=_PROBABILITIES)
QWEN3_MOE = replace(QWEN3, experts=_PROBABILITIES)
OLMOE = DecoderVariant(query_norm="all heads", experts=_PROBABILITIES, only={"clip_qkv": None})
FLEX_OLMO = replace(OLMO2, experts=_PROBABILITIES)
GRANITE_MOE = DecoderVariant(
    experts=Experts(),
    factors=Factors(
        embeddings=lambda config: config.embedding_multiplier,
        scores=lambda config, _: config.attention_multiplier,
        layers=lambda config: config.residual_multiplier,
        logits=lambda config: 1 / config.logits_scaling,
    ),
    renames=(
        ("block_sparse_moe.input_linear.weight", "mlp.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "mlp.experts.down_proj"),
        ("block_sparse_moe.router.layer", "mlp.gate"),
        # The names of checkpoints that transformers saved in its own layout.
        ("block_sparse_moe.router", "mlp.gate"),
        ("block_sparse_moe.experts", "mlp.experts"),
        ("shared_mlp.input_linear", "mlp.shared_expert.gate_up_proj"),
        ("shared_mlp.output_linear", "mlp.shared_expert.down_proj"),
    ),
    fused=_shared_gate,
)
_GRANITE_HYBRID_MOE = replace(GRANITE_MOE, has_rope=_has_positions, recurrent=apply_mamba2)
_GRANITE_HYBRID_DENSE = replace(
    _GRANITE_HYBRID_MOE,
    experts=None,
    renames=(
        ("shared_mlp.input_linear", "mlp.gate_up_proj"),
        ("shared_mlp.output_linear", "mlp.down_proj"),
    ),
    fused=_glm_gate,
)


def build_granite_hybrid(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of Granite 4, which has experts or none."""
    variant = _GRANITE_HYBRID_MOE if config.num_local_experts else _GRANITE_HYBRID_DENSE
    return variant(config, checkpoint)


ERNIE_MOE = DecoderVariant(
    interleaved=True,
    experts=Experts(corrected="Softmax"),
    renames=(_SHARED_EXPERTS, ("gate.moe_statics", "gate"), ("moe_statics", "gate")),
)
DOTS = replace(QWEN3, experts=_SIGMOIDS, renames=(_SHARED_EXPERTS,))
GLM4_MOE = replace(DOTS, has_query_norm=_has_query_norm)
HUNYUAN_MOE = replace(
    HUNYUAN,
    experts=Experts(),
    renames=(*HUNYUAN.renames, ("shared_mlp", "shared_expert"), ("gate.wg", "gate")),
)
GPT_OSS = DecoderVariant(
    has_sinks=True,
    experts=Experts(clamped=True, transposed=True),
    renames=(("mlp.router", "mlp.gate"),),
)
LFM2 = DecoderVariant(
    epsilon="norm_eps",
    query_norm="each head",
    recurrent=apply_short_convolution,
    renames=(
        ("embedding_norm", "norm"),
        ("operator_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("self_attn.out_proj", "self_attn.o_proj"),
        ("q_layernorm", "q_norm"),
        ("k_layernorm", "k_norm"),
        ("feed_forward.expert_bias", "mlp.gate.e_score_correction_bias"),
        ("feed_forward", "mlp"),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    ),
)
LFM2_MOE = replace(LFM2, experts=_SIGMOIDS)
QWEN3_5 = DecoderVariant(
    norm="offset rms",
    query_norm="each head",
    has_output_gate=True,
    recurrent=apply_gated_delta_net,
    fused=_gated_queries,
)
QWEN3_5_MOE = replace(QWEN3_5, experts=Experts())
