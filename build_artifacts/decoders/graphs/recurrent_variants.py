"""Variants of decoders with recurrent layers, by model family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.config_flags import always, is_set
from build_artifacts.decoders.graphs.decoder_variant import DecoderVariant
from build_artifacts.decoders.graphs.expert_variants import GRANITE_MOE, PROBABILITIES, SIGMOIDS
from build_artifacts.decoders.graphs.experts import Experts
from build_artifacts.decoders.graphs.kv_inputs import ModelGraphs
from build_artifacts.decoders.graphs.layer_options import (
    PRE_NORMS,
    Factors,
    LayerNorms,
)
from build_artifacts.decoders.graphs.llama_variants import OLMO2, list_gate_up
from build_artifacts.decoders.graphs.recurrent_layers import (
    apply_gated_delta_net,
    apply_mamba2,
    apply_short_convolution,
)
from build_artifacts.decoders.graphs.weights import FusedModule, RowFactors
from build_artifacts.types import FloatArray


def _gated_queries(config: TransformersConfig) -> list[FusedModule]:
    parts = ("self_attn.q_proj", "self_attn.output_gate")
    return [FusedModule("self_attn.q_proj", parts, groups=config.num_attention_heads)]


def _qwen3_next_modules(config: TransformersConfig) -> list[FusedModule]:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    outputs = values // keys * config.linear_value_head_dim  # of the value heads of a key head
    inputs = FusedModule(
        "linear_attn.in_proj_qkvz",
        tuple(f"linear_attn.in_proj_{part}" for part in "qkvz"),
        groups=keys,
        shares=(config.linear_key_head_dim, config.linear_key_head_dim, outputs, outputs),
    )
    gates = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    return [
        *_gated_queries(config),
        inputs,
        FusedModule("linear_attn.in_proj_ba", gates, groups=keys),
    ]


def _falcon_factors(config: TransformersConfig) -> RowFactors:
    """Return the multipliers of Falcon-H1, moved into the weights of linear layers.

    A linear layer whose input is multiplied has no such factor of its bias.
    """
    gate, down = config.mlp_multipliers
    source, key = config.attention_in_multiplier, config.key_multiplier
    states = config.mamba_n_groups * config.mamba_d_state
    width = config.mamba_n_heads * config.mamba_d_head
    sizes = (width, width, states, states, config.mamba_n_heads)
    inputs = np.repeat(np.asarray(config.ssm_multipliers, np.float32), sizes)
    return {
        "self_attn.q_proj.weight": source,
        "self_attn.k_proj.weight": source * key,
        "self_attn.k_proj.bias": key,
        "self_attn.v_proj.weight": source,
        "mamba.in_proj.weight": inputs * np.float32(config.ssm_in_multiplier),
        "mamba.in_proj.bias": inputs,
        **_scale_module("self_attn.o_proj", config.attention_out_multiplier),
        **_scale_module("mamba.out_proj", config.ssm_out_multiplier),
        **_scale_module("mlp.gate_proj", gate),
        **_scale_module("mlp.down_proj", down),
    }


def _scale_module(name: str, factor: float) -> dict[str, float | FloatArray]:
    return {f"{name}.weight": factor, f"{name}.bias": factor}


def _has_positions(config: TransformersConfig, _: int) -> bool:
    return bool(config.position_embedding_type == "rope")


def _has_rope_base(config: TransformersConfig, _: int) -> bool:
    return (config.rope_parameters or {}).get("rope_theta") is not None


_GRANITE_HYBRID_MOE = replace(GRANITE_MOE, has_rope=_has_positions, recurrent=apply_mamba2)
_GRANITE_HYBRID_DENSE = replace(
    _GRANITE_HYBRID_MOE,
    experts=None,
    renames=(
        ("shared_mlp.input_linear", "mlp.gate_up_proj"),
        ("shared_mlp.output_linear", "mlp.down_proj"),
    ),
    fused=list_gate_up,
)


def build_granite_hybrid(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of Granite 4, which has experts or none."""
    variant = _GRANITE_HYBRID_MOE if config.num_local_experts else _GRANITE_HYBRID_DENSE
    return variant(config, checkpoint)


BAMBA = DecoderVariant(
    recurrent=apply_mamba2,
    renames=(
        ("final_layernorm", "norm"),
        ("pre_ff_layernorm", "post_attention_layernorm"),
        ("feed_forward", "mlp"),
    ),
)
FALCON_H1 = replace(
    BAMBA,
    has_both=True,
    factors=Factors(
        embeddings=lambda config: config.embedding_multiplier,
        logits=lambda config: config.lm_head_multiplier,
    ),
    weight_factors=_falcon_factors,
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
LFM2_MOE = replace(LFM2, experts=SIGMOIDS)
_LFM3 = DecoderVariant(
    epsilon="norm_eps",
    query_norm="each head",
    has_output_gate=is_set("use_attention_gate"),
    recurrent=apply_short_convolution,
    renames=(
        (".embedding_norm.", ".norm."),
        (".operator_norm.", ".input_layernorm."),
        (".ffn_norm.", ".post_attention_layernorm."),
        (".self_attn.gate_proj.", ".self_attn.output_gate."),
        (".self_attn.g_proj.", ".self_attn.output_gate."),
        (".feed_forward.w1.", ".mlp.gate_proj."),
        (".feed_forward.w2.", ".mlp.down_proj."),
        (".feed_forward.w3.", ".mlp.up_proj."),
    ),
)


def build_lfm3(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of LFM3, which has norms before each module only, or after it, too."""
    both = LayerNorms(after_attention="post_operator_norm", after_mlp="post_ffn_norm")
    norms = both if config.use_sandwich_norm else PRE_NORMS
    return replace(_LFM3, norms=norms)(config, checkpoint)


OLMO_HYBRID = replace(
    OLMO2,
    recurrent_norms=PRE_NORMS,
    has_rope=_has_rope_base,
    recurrent=apply_gated_delta_net,
    renames=(
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
        *((f"linear_attn.{part}_proj", f"linear_attn.in_proj_{part}") for part in "qkvab"),
        ("linear_attn.g_proj", "linear_attn.in_proj_z"),
        ("linear_attn.o_proj", "linear_attn.out_proj"),
        ("linear_attn.o_norm", "linear_attn.norm"),
    ),
)
QWEN3_5 = DecoderVariant(
    norm="offset rms",
    query_norm="each head",
    has_output_gate=always,
    recurrent=apply_gated_delta_net,
    fused=_gated_queries,
)
QWEN3_NEXT = replace(QWEN3_5, experts=PROBABILITIES, fused=_qwen3_next_modules)
QWEN3_5_MOE = replace(QWEN3_5, experts=Experts())
