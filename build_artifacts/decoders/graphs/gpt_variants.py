"""Variants of decoders like GPT, with layer norms and biases, by model family."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from build_artifacts.checkpoints.architectures import TransformersConfig, read_kv_heads
from build_artifacts.decoders.graphs.alibi import (
    build_bloom_bias,
    build_falcon_bias,
    build_mpt_bias,
)
from build_artifacts.decoders.graphs.config_flags import always, is_set, never, nowhere
from build_artifacts.decoders.graphs.decoder_variant import DecoderVariant
from build_artifacts.decoders.graphs.kv_inputs import ModelGraphs
from build_artifacts.decoders.graphs.layer_options import (
    PRE_NORMS,
    SHARED_NORM,
    Factors,
    LayerNorms,
    TokenPositions,
)
from build_artifacts.decoders.graphs.operators import stretched_sinusoids
from build_artifacts.decoders.graphs.weights import FusedModule
from build_artifacts.types import FloatArray

_QUERY, _KEY, _VALUE = (f"self_attn.{part}_proj" for part in "qkv")


def _join_heads(module: str) -> Callable[[TransformersConfig], list[FusedModule]]:
    """Describe a module that has, for each KV head, its query heads, its key and its value."""

    def describe(config: TransformersConfig) -> list[FusedModule]:
        groups = read_kv_heads(config)
        shares = (config.num_attention_heads // groups, 1, 1)
        return [FusedModule(module, (_QUERY, _KEY, _VALUE), groups, shares)]

    return describe


def _gpt2_heads(_: TransformersConfig) -> list[FusedModule]:
    return [FusedModule("self_attn.c_attn", (_QUERY, _KEY, _VALUE))]


def _gpt2_scale(config: TransformersConfig, layer: int) -> float:
    """Return the factor of the scores. GPT-BigCode has none by layer."""
    size = config.hidden_size // config.num_attention_heads
    scale = size**-0.5 if config.scale_attn_weights else 1.0
    by_layer = config.model_type == "gpt2" and config.scale_attn_by_inverse_layer_idx
    return float(scale / (layer + 1) if by_layer else scale)


def _codegen_heads(_: TransformersConfig) -> list[FusedModule]:
    """Describe the order in which the weights were split among four devices."""
    return [FusedModule("self_attn.qkv_proj", (_QUERY, _VALUE, _KEY), groups=4)]


def _mpt_scale(config: TransformersConfig, _: int) -> float:
    size = config.hidden_size // config.num_attention_heads
    return float(config.attn_config.softmax_scale or size**-0.5)


def _fairseq_scale(config: TransformersConfig) -> float:
    return math.sqrt(config.hidden_size) if config.scale_embedding else 1.0


def _xglm_positions(config: TransformersConfig) -> FloatArray:
    """Return sinusoids, with zeros in the row that has the number of the padding token."""
    table = stretched_sinusoids(config.max_position_embeddings + 2, config.hidden_size)
    if config.pad_token_id is not None:
        table[config.pad_token_id] = 0
    return table


def _falcon_is_parallel(config: TransformersConfig) -> bool:
    return bool(config.new_decoder_architecture or config.parallel_attn)


def _opt_projects(config: TransformersConfig) -> bool:
    return bool(config.word_embed_proj_dim != config.hidden_size)


def _opt_has_last_norm(config: TransformersConfig) -> bool:
    return bool(config.do_layer_norm_before and not config._remove_final_layer_norm)


_NAMES = (
    (".h.", ".layers."),
    (".wte.", ".embed_tokens."),
    (".wpe.", ".embed_positions."),
    (".ln_f.", ".norm."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    (".attn.", ".self_attn."),
    (".self_attn.c_proj.", ".self_attn.o_proj."),
    (".mlp.c_fc.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
)
GPT2 = DecoderVariant(
    norm="layer",
    epsilon="layer_norm_epsilon",
    gated=False,
    has_rope=nowhere,
    positions=TokenPositions(),
    factors=Factors(scores=_gpt2_scale),
    base="transformer.",
    renames=_NAMES,
    fused=_gpt2_heads,
    transposed=("c_attn", "c_fc", "c_proj"),
    only={"add_cross_attention": False},
)
GPT_BIGCODE = replace(GPT2, fused=_join_heads("self_attn.c_attn"), transposed=())
GPT_NEO = replace(
    GPT2,
    factors=Factors(scores=lambda _, __: 1.0),
    renames=(
        (".attn.attention.", ".self_attn."),
        (".out_proj.", ".o_proj."),
        *_NAMES,
    ),
    fused=None,
    transposed=(),
    only={},
)
GPTJ = DecoderVariant(
    norm="layer",
    epsilon="layer_norm_epsilon",
    norms=SHARED_NORM,
    parallel=always,
    gated=False,
    interleaved=True,
    base="transformer.",
    renames=(
        *_NAMES,
        (".out_proj.", ".o_proj."),
        (".mlp.fc_in.", ".mlp.up_proj."),
        (".mlp.fc_out.", ".mlp.down_proj."),
    ),
)
CODEGEN = replace(GPTJ, fused=_codegen_heads)
_FAIRSEQ_NAMES = (
    (".self_attn_layer_norm.", ".input_layernorm."),
    (".final_layer_norm.", ".norm."),  # before the MLP of a layer; in OPT also after all layers
    (".layer_norm.", ".norm."),
    (".out_proj.", ".o_proj."),
    (".fc1.", ".mlp.up_proj."),
    (".fc2.", ".mlp.down_proj."),
)
_OPT = DecoderVariant(
    norm="layer",
    epsilon=1e-5,  # torch's default; the configs state none
    norms=LayerNorms(before_mlp="norm"),
    has_last_norm=_opt_has_last_norm,
    gated=False,
    has_rope=nowhere,
    positions=TokenPositions(first=2),
    has_projections=_opt_projects,
    renames=((".decoder.", "."), *_FAIRSEQ_NAMES),
    only={"layer_norm_elementwise_affine": True},
)
_OPT_POST_NORM = replace(
    _OPT,
    norms=LayerNorms(
        before_attention=None,
        after_attention="input_layernorm",
        before_mlp=None,
        after_mlp="norm",
        after_sums=True,
    ),
)


def build_opt(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of an OPT. Of its sizes, 350m has norms after the sums."""
    variant = _OPT if config.do_layer_norm_before else _OPT_POST_NORM
    return variant(config, checkpoint)


BIOGPT = replace(
    _OPT,
    has_last_norm=always,
    has_projections=never,
    factors=Factors(embeddings=_fairseq_scale),
    base="biogpt.",
    renames=((".output_projection.", ".lm_head."), *_FAIRSEQ_NAMES),
    only={},
)
XGLM = replace(
    BIOGPT,
    positions=TokenPositions(first=2, compute=_xglm_positions),
    base="model.",
    only={"add_cross_attention": False},
)
_MEGATRON_NAMES = (
    (".attention.", ".self_attn."),
    (".self_attention.", ".self_attn."),
    (".self_attn.dense.", ".self_attn.o_proj."),
    (".mlp.dense_h_to_4h.", ".mlp.up_proj."),
    (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
)
GPT_NEOX = DecoderVariant(
    norm="layer",
    epsilon="layer_norm_eps",
    parallel=is_set("use_parallel_residual"),
    gated=False,
    base="gpt_neox.",
    renames=(
        (".embed_in.", ".embed_tokens."),
        (".embed_out.", ".lm_head."),
        (".final_layer_norm.", ".norm."),
        *_MEGATRON_NAMES,
    ),
    fused=_join_heads("self_attn.query_key_value"),
)
PERSIMMON = DecoderVariant(
    norm="layer",
    epsilon="layer_norm_eps",
    query_norm="each head",
    has_query_norm=is_set("qk_layernorm"),
    gated=False,
    renames=(
        (".final_layernorm.", ".norm."),
        (".q_layernorm.", ".q_norm."),
        (".k_layernorm.", ".k_norm."),
        *_MEGATRON_NAMES,
    ),
    fused=_join_heads("self_attn.query_key_value"),
)
BLOOM = DecoderVariant(
    norm="layer",
    epsilon="layer_norm_epsilon",
    has_embeddings_norm=True,
    gated=False,
    has_rope=nowhere,
    alibi=build_bloom_bias,
    base="transformer.",
    renames=(
        *_NAMES,
        (".word_embeddings.", ".embed_tokens."),
        (".word_embeddings_layernorm.", ".embed_norm."),
        *_MEGATRON_NAMES,
    ),
    fused=_join_heads("self_attn.query_key_value"),
    only={"apply_residual_connection_post_layernorm": False},
)
MPT = DecoderVariant(
    norm="layer",
    epsilon="layer_norm_epsilon",
    gated=False,
    has_rope=nowhere,
    alibi=build_mpt_bias,
    factors=Factors(scores=_mpt_scale),
    base="transformer.",
    renames=(
        *_NAMES,
        (".blocks.", ".layers."),
        (".norm_f.", ".norm."),
        (".norm_1.", ".input_layernorm."),
        (".norm_2.", ".post_attention_layernorm."),
        (".out_proj.", ".o_proj."),
        (".ffn.", ".mlp."),
    ),
    fused=lambda _: [FusedModule("self_attn.Wqkv", (_QUERY, _KEY, _VALUE))],
    # transformers supports `clip_qkv` and ignores the others.
    only={
        "attn_config.clip_qkv": None,
        "attn_config.alibi": True,
        "attn_config.alibi_bias_max": 8,
        "attn_config.attn_type": "multihead_attention",
        "attn_config.prefix_lm": False,
        "attn_config.qk_ln": False,
        "logit_scale": None,
        "no_bias": True,
    },
)
_FALCON = DecoderVariant(
    norm="layer",
    epsilon="layer_norm_epsilon",
    parallel=_falcon_is_parallel,
    gated=False,
    base="transformer.",
    renames=BLOOM.renames,
    fused=_join_heads("self_attn.query_key_value"),
)


def build_falcon(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of a Falcon, which has RoPE or ALiBi, and one or two norms per layer."""
    norms = PRE_NORMS  # of layers whose MLP reads the result of the attention
    if config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2):
        norms = LayerNorms(before_attention="ln_attn", before_mlp="ln_mlp")
    elif _falcon_is_parallel(config):
        norms = SHARED_NORM
    variant = replace(_FALCON, norms=norms)
    if config.alibi:
        variant = replace(variant, has_rope=nowhere, alibi=build_falcon_bias)
    return variant(config, checkpoint)
