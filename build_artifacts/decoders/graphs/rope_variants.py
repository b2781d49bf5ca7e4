"""Variants of decoders with RoPE, by model family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.config_flags import always
from build_artifacts.decoders.graphs.experts import Experts
from build_artifacts.decoders.graphs.kv_inputs import ModelGraphs
from build_artifacts.decoders.graphs.recurrent_layers import (
    apply_gated_delta_net,
    apply_mamba2,
    apply_short_convolution,
)
from build_artifacts.decoders.graphs.rope_decoder import (
    POST_NORMS,
    SHARED_NORM,
    Factors,
    LayerNorms,
    Limits,
    RopeDecoder,
)
from build_artifacts.decoders.graphs.weights import FusedModule
from build_artifacts.errors import UnsupportedModel
from build_artifacts.types import FloatArray
from deployments.engines.pytorch.layer_types import read_windows

_LLAMA4_FIELDS = ("llama_4_scaling_beta", "original_max_position_embeddings")


def _normalizes_experts(config: TransformersConfig) -> bool:
    return bool(config.norm_topk_prob)


def _has_parallel_layers(config: TransformersConfig) -> bool:
    return bool(config.use_parallel_residual)


def _has_window(config: TransformersConfig, layer: int) -> bool:
    return read_windows(config)[layer] is not None


def _is_listed(config: TransformersConfig, layer: int) -> bool:
    return bool(config.no_rope_layers[layer])  # the field lists 1 for layers with RoPE


def _has_window_if_any(config: TransformersConfig, layer: int) -> bool:
    return config.sliding_window is None or _has_window(config, layer)


def _neox_heads(config: TransformersConfig) -> FusedModule:
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return FusedModule("attention.query_key_value", parts, groups=config.num_attention_heads)


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


def _has_head_norms(config: TransformersConfig) -> bool:
    return bool(config.qk_layernorm)


def _has_query_norm(config: TransformersConfig) -> bool:
    return bool(config.use_qk_norm)


def _llama4_factors(config: TransformersConfig, positions: NDArray[np.int64]) -> FloatArray:
    """Return factors that grow with each multiple of the original context, as in Llama 4."""
    rope = config.rope_parameters
    beta, original = (rope.get(name) for name in _LLAMA4_FIELDS)
    if beta is None or not original:
        raise UnsupportedModel(
            f"`rope_parameters` of the architecture `{config.model_type}` lack "
            f"{' or '.join(f'`{name}`' for name in _LLAMA4_FIELDS)}",
            hint="use the config of the published checkpoint",
        )
    factors: FloatArray = (1 + beta * np.log1p(positions // original)).astype(np.float32)
    return factors


LLAMA = RopeDecoder()
MINISTRAL3 = RopeDecoder(factors=Factors(queries=_llama4_factors))
QWEN3 = RopeDecoder(query_norm="each head")
SMOLLM3 = RopeDecoder(has_rope=_is_listed)
ARCEE = RopeDecoder(gated=False)
HELIUM = RopeDecoder(interleaved=True)
HUNYUAN = RopeDecoder(
    query_norm="each head",
    rope_before_norm=True,
    renames=(("query_layernorm", "q_norm"), ("key_layernorm", "k_norm")),
)
OLMO = RopeDecoder(norm="unit layer", epsilon=1e-5, limits=Limits(projections="clip_qkv"))
OLMO2 = RopeDecoder(norms=POST_NORMS, query_norm="all heads")
EXAONE4 = RopeDecoder(norms=POST_NORMS, query_norm="each head", has_rope=_has_window_if_any)
COHERE = RopeDecoder(
    norm="layer",
    epsilon="layer_norm_eps",
    norms=SHARED_NORM,
    parallel=always,
    interleaved=True,
    factors=Factors(logits=lambda config: config.logit_scale),
    unsupported=("use_qk_norm",),
)
COHERE2 = replace(COHERE, has_rope=_has_window, unsupported=())
STABLELM = RopeDecoder(
    norm="layer",
    epsilon="layer_norm_eps",
    unsupported=("qk_layernorm", "use_parallel_residual"),
)
STARCODER2 = RopeDecoder(
    norm="layer",
    epsilon="norm_epsilon",
    gated=False,
    renames=(("mlp.c_fc", "mlp.up_proj"), ("mlp.c_proj", "mlp.down_proj")),
)
GPT_NEOX = RopeDecoder(
    norm="layer",
    epsilon="layer_norm_eps",
    parallel=_has_parallel_layers,
    gated=False,
    base="gpt_neox.",
    renames=(
        ("embed_in", "embed_tokens"),
        ("embed_out", "lm_head"),
        ("final_layer_norm", "norm"),
        ("attention.dense", "self_attn.o_proj"),
        ("mlp.dense_h_to_4h", "mlp.up_proj"),
        ("mlp.dense_4h_to_h", "mlp.down_proj"),
    ),
    fused=_neox_heads,
)
JAIS2 = RopeDecoder(norm="layer", epsilon="layer_norm_eps", gated=False)
PERSIMMON = RopeDecoder(
    norm="layer",
    epsilon="layer_norm_eps",
    query_norm="each head",
    has_query_norm=_has_head_norms,
    gated=False,
    renames=(
        ("final_layernorm", "norm"),
        ("q_layernorm", "q_norm"),
        ("k_layernorm", "k_norm"),
        ("self_attn.query_key_value", "attention.query_key_value"),
        ("self_attn.dense", "self_attn.o_proj"),
        ("mlp.dense_h_to_4h", "mlp.up_proj"),
        ("mlp.dense_4h_to_h", "mlp.down_proj"),
    ),
    fused=_neox_heads,
)
APERTUS = RopeDecoder(
    norms=LayerNorms(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
    query_norm="each head",
    gated=False,
)
_NANOCHAT = RopeDecoder(
    norm="unit rms",
    embeddings_norm="embeddings_norm",
    query_norm="each head",
    turns_back=True,
    gated=False,
    limits=Limits(logits="final_logit_softcapping"),
    renames=(("mlp.fc1", "mlp.up_proj"), ("mlp.fc2", "mlp.down_proj")),
)


def build_nanochat(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of NanoChat, whose RoPE comes before the norms of queries and keys.

    These norms have no weights, so RoPE may as well follow them, unless it changes lengths. Then
    the attention node applies it, and the KV cache can be int8.
    """
    changes_lengths = config.rope_parameters["rope_type"] in ("yarn", "longrope")
    return replace(_NANOCHAT, rope_before_norm=changes_lengths)(config, checkpoint)


VAULTGEMMA = RopeDecoder(
    norm="offset rms",
    norms=LayerNorms(before_mlp="pre_feedforward_layernorm"),
    factors=Factors(
        embeddings=lambda config: config.hidden_size**0.5,
        scores=lambda config: config.query_pre_attn_scalar**-0.5,
    ),
    limits=Limits(scores="attn_logit_softcapping", logits="final_logit_softcapping"),
)
GLM = RopeDecoder(interleaved=True, fused=_glm_gate)
GLM4 = RopeDecoder(
    norms=LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    interleaved=True,
    fused=_glm_gate,
)

_SHARED_EXPERTS = ("shared_experts", "shared_expert")
_PROBABILITIES = Experts(normalized=_normalizes_experts)
_SIGMOIDS = Experts(
    normalized=_normalizes_experts, corrected="Sigmoid", factor="routed_scaling_factor"
)
MIXTRAL = RopeDecoder(
    experts=Experts(),
    renames=(
        ("block_sparse_moe", "mlp"),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    ),
)
QWEN2_MOE = RopeDecoder(experts=_PROBABILITIES)
QWEN3_MOE = replace(QWEN3, experts=_PROBABILITIES)
OLMOE = RopeDecoder(query_norm="all heads", experts=_PROBABILITIES, unsupported=("clip_qkv",))
FLEX_OLMO = replace(OLMO2, experts=_PROBABILITIES)
GRANITE_MOE = RopeDecoder(
    experts=Experts(),
    factors=Factors(
        embeddings=lambda config: config.embedding_multiplier,
        scores=lambda config: config.attention_multiplier,
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


ERNIE_MOE = RopeDecoder(
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
GPT_OSS = RopeDecoder(
    has_sinks=True,
    experts=Experts(clamped=True, transposed=True),
    renames=(("mlp.router", "mlp.gate"),),
)
LFM2 = RopeDecoder(
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
QWEN3_5 = RopeDecoder(
    norm="offset rms",
    query_norm="each head",
    has_output_gate=True,
    recurrent=apply_gated_delta_net,
    # Checkpoints with image inputs have this prefix.
    renames=(("language_model.", ""),),
    fused=_gated_queries,
)
QWEN3_5_MOE = replace(QWEN3_5, experts=Experts())
