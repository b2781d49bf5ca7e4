"""Variants of decoders with RoPE, by model family. All layers have attention and an MLP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.config_flags import (
    always,
    has_base,
    has_window,
    has_window_if_any,
)
from build_artifacts.decoders.graphs.kv_inputs import ModelGraphs
from build_artifacts.decoders.graphs.layer_options import (
    POST_NORMS,
    PRE_NORMS,
    SHARED_NORM,
    Factors,
    LayerNorms,
    Limits,
)
from build_artifacts.decoders.graphs.rope_decoder import RopeDecoder
from build_artifacts.decoders.graphs.weights import FusedModule
from build_artifacts.errors import UnsupportedModel
from build_artifacts.types import FloatArray

_LLAMA4_FIELDS = ("llama_4_scaling_beta", "original_max_position_embeddings")


def _has_parallel_layers(config: TransformersConfig) -> bool:
    return bool(config.use_parallel_residual)


def _is_listed(config: TransformersConfig, layer: int) -> bool:
    return bool(config.no_rope_layers[layer])  # the field lists 1 for layers with RoPE


def _neox_heads(config: TransformersConfig) -> list[FusedModule]:
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return [FusedModule("attention.query_key_value", parts, groups=config.num_attention_heads)]


def fuse_gate(_: TransformersConfig) -> list[FusedModule]:
    return [FusedModule("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))]


def _has_head_norms(config: TransformersConfig) -> bool:
    return bool(config.qk_layernorm)


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
EXAONE4 = RopeDecoder(norms=POST_NORMS, query_norm="each head", has_rope=has_window_if_any)
COHERE = RopeDecoder(
    norm="layer",
    epsilon="layer_norm_eps",
    norms=SHARED_NORM,
    parallel=always,
    interleaved=True,
    factors=Factors(logits=lambda config: config.logit_scale),
    unsupported=("use_qk_norm",),
)
COHERE2 = replace(COHERE, has_rope=has_window, unsupported=())
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
GLM = RopeDecoder(interleaved=True, fused=fuse_gate)
GLM4 = RopeDecoder(
    norms=LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    interleaved=True,
    fused=fuse_gate,
)
GRANITE_FACTORS = Factors(
    embeddings=lambda config: config.embedding_multiplier,
    scores=lambda config: config.attention_multiplier,
    layers=lambda config: config.residual_multiplier,
    logits=lambda config: 1 / config.logits_scaling,
)
GRANITE_SWA = RopeDecoder(has_rope=has_base, has_sinks=True, factors=GRANITE_FACTORS)
_HYPERCLOVAX = RopeDecoder(
    factors=replace(GRANITE_FACTORS, logits=lambda config: config.logits_scaling)
)


def build_hyperclovax(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of HyperCLOVA X, which has norms after attention and MLP or none."""
    post_norms = LayerNorms(after_attention="post_norm1", after_mlp="post_norm2")
    norms = post_norms if config.use_post_norm else PRE_NORMS
    return replace(_HYPERCLOVAX, norms=norms)(config, checkpoint)
