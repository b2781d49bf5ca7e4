"""Variants of decoders like GPT, with layer norms and biases, by model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from build_artifacts.checkpoints.architectures import TransformersConfig, read_kv_heads
from build_artifacts.decoders.graphs.alibi import Alibi
from build_artifacts.decoders.graphs.config_flags import always, nowhere
from build_artifacts.decoders.graphs.decoder_variant import (
    SHARED_NORM,
    DecoderVariant,
    Factors,
    LayerNorms,
)
from build_artifacts.decoders.graphs.kv_inputs import ModelGraphs
from build_artifacts.decoders.graphs.weights import FusedModule

_QUERY, _KEY, _VALUE = (f"self_attn.{part}_proj" for part in "qkv")


def _join_heads(module: str) -> Callable[[TransformersConfig], FusedModule]:
    """Describe a module that has, for each KV head, its query heads, its key and its value."""

    def describe(config: TransformersConfig) -> FusedModule:
        groups = read_kv_heads(config)
        shares = (config.num_attention_heads // groups, 1, 1)
        return FusedModule(module, (_QUERY, _KEY, _VALUE), groups, shares)

    return describe


def _gpt2_heads(_: TransformersConfig) -> FusedModule:
    return FusedModule("self_attn.c_attn", (_QUERY, _KEY, _VALUE))


def _gpt2_scale(config: TransformersConfig, layer: int) -> float:
    """Return the factor of the scores. GPT-BigCode has none by layer."""
    size = config.hidden_size // config.num_attention_heads
    scale = size**-0.5 if config.scale_attn_weights else 1.0
    by_layer = config.model_type == "gpt2" and config.scale_attn_by_inverse_layer_idx
    return float(scale / (layer + 1) if by_layer else scale)


def _has_parallel_layers(config: TransformersConfig) -> bool:
    return bool(config.use_parallel_residual)


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
    first_position=0,
    factors=Factors(scores=_gpt2_scale),
    base="transformer.",
    renames=_NAMES,
    fused=_gpt2_heads,
    transposed=("c_attn", "c_fc", "c_proj"),
    unsupported=("add_cross_attention",),
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
    unsupported=(),
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
_OPT = DecoderVariant(
    norm="layer",
    epsilon=1e-5,  # torch's default; the configs state none
    norms=LayerNorms(before_mlp="norm"),
    has_last_norm=_opt_has_last_norm,
    gated=False,
    has_rope=nowhere,
    first_position=2,
    has_projections=_opt_projects,
    renames=(
        (".decoder.", "."),
        (".self_attn_layer_norm.", ".input_layernorm."),
        (".final_layer_norm.", ".norm."),  # of the MLP in a layer, and after all layers
        (".out_proj.", ".o_proj."),
        (".fc1.", ".mlp.up_proj."),
        (".fc2.", ".mlp.down_proj."),
    ),
    required=("layer_norm_elementwise_affine",),
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


_MEGATRON_NAMES = (
    (".attention.", ".self_attention."),
    (".self_attention.dense.", ".self_attn.o_proj."),
    (".mlp.dense_h_to_4h.", ".mlp.up_proj."),
    (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
)
GPT_NEOX = DecoderVariant(
    norm="layer",
    epsilon="layer_norm_eps",
    parallel=_has_parallel_layers,
    gated=False,
    base="gpt_neox.",
    renames=(
        (".embed_in.", ".embed_tokens."),
        (".embed_out.", ".lm_head."),
        (".final_layer_norm.", ".norm."),
        *_MEGATRON_NAMES,
    ),
    fused=_join_heads("self_attention.query_key_value"),
)
BLOOM = DecoderVariant(
    norm="layer",
    epsilon="layer_norm_epsilon",
    has_embeddings_norm=True,
    gated=False,
    has_rope=nowhere,
    alibi=Alibi(),
    base="transformer.",
    renames=(
        *_NAMES,
        (".word_embeddings.", ".embed_tokens."),
        (".word_embeddings_layernorm.", ".embed_norm."),
        *_MEGATRON_NAMES,
    ),
    fused=_join_heads("self_attention.query_key_value"),
    unsupported=("apply_residual_connection_post_layernorm",),
)
_FALCON = DecoderVariant(
    norm="layer",
    epsilon="layer_norm_epsilon",
    parallel=_falcon_is_parallel,
    gated=False,
    base="transformer.",
    renames=BLOOM.renames,
    fused=_join_heads("self_attention.query_key_value"),
)


def build_falcon(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of a Falcon, which has RoPE or ALiBi, and one or two norms per layer."""
    norms = LayerNorms()  # of layers whose MLP reads the result of the attention
    if config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2):
        norms = LayerNorms(before_attention="ln_attn", before_mlp="ln_mlp")
    elif _falcon_is_parallel(config):
        norms = SHARED_NORM
    variant = replace(_FALCON, norms=norms)
    if config.alibi:
        alibi = Alibi(is_rounded=True, is_scaled=True)
        variant = replace(variant, has_rope=nowhere, alibi=alibi)
    return variant(config, checkpoint)
