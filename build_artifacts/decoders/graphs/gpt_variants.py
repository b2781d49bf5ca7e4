"""Variants of decoders like GPT, with layer norms and biases, by model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from build_artifacts.checkpoints.architectures import TransformersConfig, read_kv_heads
from build_artifacts.decoders.graphs.config_flags import nowhere
from build_artifacts.decoders.graphs.decoder_variant import DecoderVariant, Factors, LayerNorms
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
    """Return the factor of the scores. Configs of GPT-BigCode have no factor by layer."""
    size = config.hidden_size // config.num_attention_heads
    scale = size**-0.5 if config.scale_attn_weights else 1.0
    by_layer = getattr(config, "scale_attn_by_inverse_layer_idx", False)
    return float(scale / (layer + 1) if by_layer else scale)


def _has_parallel_layers(config: TransformersConfig) -> bool:
    return bool(config.use_parallel_residual)


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
