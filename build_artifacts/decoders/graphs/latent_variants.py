"""Variants of decoders with latent attention, by model family."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.config_flags import never
from build_artifacts.decoders.graphs.decoder_variant import DecoderVariant
from build_artifacts.decoders.graphs.expert_variants import SHARED_EXPERTS, SIGMOIDS
from build_artifacts.decoders.graphs.experts import Experts
from build_artifacts.decoders.graphs.kv_inputs import ModelGraphs
from build_artifacts.decoders.graphs.latent_attention import (
    compute_latent_scale,
    list_latent_modules,
)
from build_artifacts.decoders.graphs.layer_options import Factors

_SCORES = Factors(scores=compute_latent_scale)
_DENSE = DecoderVariant(has_latents=True, factors=_SCORES, fused=list_latent_modules)
MINICPM3 = replace(
    _DENSE,
    factors=replace(
        _SCORES,
        embeddings=lambda config: config.scale_emb,
        layers=lambda config: config.scale_depth / math.sqrt(config.num_hidden_layers),
        logits=lambda config: 1 / config.logits_scaling,
    ),
)
DEEPSEEK_V2 = replace(
    _DENSE,
    interleaved=True,
    experts=Experts(normalized=never, factor="routed_scaling_factor"),
    renames=(SHARED_EXPERTS,),
    only={"topk_method": "greedy"},
)
_SIGMOID_EXPERTS = replace(_DENSE, experts=SIGMOIDS, renames=(SHARED_EXPERTS,))


def build_youtu(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of Youtu, whose config states which channels RoPE pairs."""
    return replace(_DENSE, interleaved=bool(config.rope_interleave))(config, checkpoint)


def build_deepseek_v3(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of DeepSeek-V3 or a relative, such as GLM-4.7-Flash."""
    variant = replace(_SIGMOID_EXPERTS, interleaved=bool(config.rope_interleave))
    return variant(config, checkpoint)
