"""Variants of decoders like Llama, by model family. All layers have attention and an MLP."""

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
from build_artifacts.decoders.graphs.decoder_variant import DecoderVariant
from build_artifacts.decoders.graphs.kv_inputs import ModelGraphs
from build_artifacts.decoders.graphs.layer_options import (
    POST_NORMS,
    PRE_NORMS,
    SHARED_NORM,
    Factors,
    LayerNorms,
    Limits,
)
from build_artifacts.decoders.graphs.weights import FusedModule
from build_artifacts.errors import UnsupportedModel
from build_artifacts.types import FloatArray

_LLAMA4_FIELDS = ("llama_4_scaling_beta", "original_max_position_embeddings")


def _has_rope(config: TransformersConfig, layer: int) -> bool:
    return bool(config.no_rope_layers[layer])  # the field lists 1 for layers with RoPE


def list_gate_up(_: TransformersConfig) -> list[FusedModule]:
    return [FusedModule("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))]


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


LLAMA = DecoderVariant()
MINISTRAL3 = DecoderVariant(factors=Factors(queries=_llama4_factors))
QWEN3 = DecoderVariant(query_norm="each head")
SMOLLM3 = DecoderVariant(has_rope=_has_rope)
ARCEE = DecoderVariant(gated=False)
HELIUM = DecoderVariant(interleaved=True)
HUNYUAN = DecoderVariant(
    query_norm="each head",
    rope_before_norm=True,
    renames=(("query_layernorm", "q_norm"), ("key_layernorm", "k_norm")),
)
OLMO = DecoderVariant(norm="unit layer", epsilon=1e-5, limits=Limits(projections="clip_qkv"))
OLMO2 = DecoderVariant(norms=POST_NORMS, query_norm="all heads")
EXAONE4 = DecoderVariant(norms=POST_NORMS, query_norm="each head", has_rope=has_window_if_any)
COHERE = DecoderVariant(
    norm="layer",
    epsilon="layer_norm_eps",
    norms=SHARED_NORM,
    parallel=always,
    interleaved=True,
    factors=Factors(logits=lambda config: config.logit_scale),
    only={"use_qk_norm": False},
)
COHERE2 = replace(COHERE, has_rope=has_window, only={})
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
JAIS2 = DecoderVariant(norm="layer", epsilon="layer_norm_eps", gated=False)
APERTUS = DecoderVariant(
    norms=LayerNorms(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
    query_norm="each head",
    gated=False,
)
_NANOCHAT = DecoderVariant(
    norm="unit rms",
    has_embeddings_norm=True,
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


VAULTGEMMA = DecoderVariant(
    norm="offset rms",
    norms=LayerNorms(before_mlp="pre_feedforward_layernorm"),
    factors=Factors(
        embeddings=lambda config: config.hidden_size**0.5,
        scores=lambda config, _: config.query_pre_attn_scalar**-0.5,
    ),
    limits=Limits(scores="attn_logit_softcapping", logits="final_logit_softcapping"),
)
GLM = DecoderVariant(interleaved=True, fused=list_gate_up)
GLM4 = DecoderVariant(
    norms=LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    interleaved=True,
    fused=list_gate_up,
)
GRANITE_FACTORS = Factors(
    embeddings=lambda config: config.embedding_multiplier,
    scores=lambda config, _: config.attention_multiplier,
    layers=lambda config: config.residual_multiplier,
    logits=lambda config: 1 / config.logits_scaling,
)
GRANITE_SWA = DecoderVariant(has_rope=has_base, has_sinks=True, factors=GRANITE_FACTORS)
_HYPERCLOVAX = DecoderVariant(
    factors=replace(GRANITE_FACTORS, logits=lambda config: config.logits_scaling)
)


def build_hyperclovax(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of HyperCLOVA X, which has norms after attention and MLP or none."""
    post_norms = LayerNorms(after_attention="post_norm1", after_mlp="post_norm2")
    norms = post_norms if config.use_post_norm else PRE_NORMS
    return replace(_HYPERCLOVAX, norms=norms)(config, checkpoint)
