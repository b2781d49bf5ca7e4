"""Variants of decoders with mixtures of experts, by model family."""

from __future__ import annotations

from dataclasses import replace

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.config_flags import (
    always,
    has_base,
    has_window,
    has_window_if_any,
    is_set,
)
from build_artifacts.decoders.graphs.decoder_variant import DecoderVariant
from build_artifacts.decoders.graphs.experts import Experts
from build_artifacts.decoders.graphs.layer_options import Factors, LayerNorms
from build_artifacts.decoders.graphs.llama_variants import GRANITE_FACTORS, HUNYUAN, OLMO2, QWEN3
from build_artifacts.decoders.graphs.weights import FusedModule


def _scale_of_width(config: TransformersConfig) -> float:
    return float(config.hidden_size**0.5) if config.mup_enabled else 1.0


def _shared_gate(_: TransformersConfig) -> list[FusedModule]:
    gate, up = "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"
    return [FusedModule("mlp.shared_expert.gate_up_proj", (gate, up))]


SHARED_EXPERTS = ("shared_experts", "shared_expert")
PROBABILITIES = Experts(normalized=is_set("norm_topk_prob"))
SIGMOIDS = Experts(
    normalized=is_set("norm_topk_prob"), corrected="Sigmoid", factor="routed_scaling_factor"
)
SIGMOIDS_SQUARED = replace(SIGMOIDS, squared=True)
_MIXTRAL_NAMES = (
    ("block_sparse_moe", "mlp"),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)
_CORRECTION = ("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias")
MIXTRAL = DecoderVariant(experts=Experts(), renames=_MIXTRAL_NAMES)
MINIMAX_M2 = DecoderVariant(
    query_norm="all heads",
    experts=Experts(corrected="Sigmoid"),
    renames=(*_MIXTRAL_NAMES, _CORRECTION),
)
PHI_MOE = DecoderVariant(
    norm="layer",
    experts=Experts(noise="router_jitter_noise"),
    renames=(*_MIXTRAL_NAMES, ("mlp.router", "mlp.gate")),
)
QWEN2_MOE = DecoderVariant(experts=PROBABILITIES)
QWEN3_MOE = replace(QWEN3, experts=PROBABILITIES)
OLMOE = DecoderVariant(query_norm="all heads", experts=PROBABILITIES, only={"clip_qkv": None})
FLEX_OLMO = replace(OLMO2, experts=PROBABILITIES)
GRANITE_MOE = DecoderVariant(
    experts=Experts(),
    factors=GRANITE_FACTORS,
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
GRANITE_MOE_SWA = replace(GRANITE_MOE, has_rope=has_base, has_sinks=True)
ERNIE_MOE = DecoderVariant(
    interleaved=True,
    experts=Experts(corrected="Softmax"),
    renames=(SHARED_EXPERTS, ("gate.moe_statics", "gate"), ("moe_statics", "gate")),
)
DOTS = replace(QWEN3, experts=SIGMOIDS, renames=(SHARED_EXPERTS,))
HY_V3 = replace(
    QWEN3,
    experts=Experts(corrected="Sigmoid", factor="router_scaling_factor"),
    renames=(
        SHARED_EXPERTS,
        ("shared_mlp", "shared_expert"),
        ("mlp.router.gate", "mlp.gate"),
        ("mlp.expert_bias", "mlp.e_score_correction_bias"),
        _CORRECTION,
    ),
)
SOLAR_OPEN = replace(DOTS, query_norm=None)
EXAONE_MOE = replace(DOTS, has_rope=has_window_if_any, renames=(SHARED_EXPERTS, _CORRECTION))
AFMOE = DecoderVariant(
    norms=LayerNorms(
        after_attention="post_attention_layernorm",
        before_mlp="pre_mlp_layernorm",
        after_mlp="post_mlp_layernorm",
    ),
    query_norm="each head",
    has_rope=has_window,
    has_output_gate=always,
    factors=Factors(embeddings=_scale_of_width),
    experts=Experts(corrected="Sigmoid", factor="route_scale"),
    renames=(
        SHARED_EXPERTS,
        ("mlp.router.gate", "mlp.gate"),
        ("mlp.expert_bias", "mlp.gate.e_score_correction_bias"),
        ("self_attn.gate_proj", "self_attn.output_gate"),
    ),
)
GLM4_MOE = replace(DOTS, has_query_norm=is_set("use_qk_norm"))
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
