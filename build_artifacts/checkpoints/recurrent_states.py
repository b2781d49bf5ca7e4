"""Sizes of the recurrent states of a decoder, by kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from build_artifacts.checkpoints.architectures import TransformersConfig
from deployments.engines.pytorch.layer_types import list_attention_layers

HYBRID_LAYER = "hybrid"  # value of `layer_types`


def count_state_values(config: TransformersConfig) -> int:
    """Return the number of values that all recurrent states of one text have together."""
    attention = 0 if has_hybrid_layers(config) else len(list_attention_layers(config))
    layers: int = config.num_hidden_layers - attention
    return layers * _VALUES_PER_LAYER[config.model_type](config) if layers else 0


def has_known_states(config: TransformersConfig) -> bool:
    """Return whether layers of this model may have recurrent states."""
    return config.model_type in _VALUES_PER_LAYER


def has_hybrid_layers(config: TransformersConfig) -> bool:
    """Return whether all layers of this model have both attention and a recurrent state."""
    return bool(config.model_type == "falcon_h1")


def _short_convolution(config: TransformersConfig) -> int:
    return int(config.hidden_size * (config.conv_L_cache - 1))


def _gated_delta_net(config: TransformersConfig) -> int:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    convolved = (2 * keys + values) * (config.linear_conv_kernel_dim - 1)
    return int(convolved + values * config.linear_key_head_dim)


def _mamba2(config: TransformersConfig) -> int:
    values = config.mamba_n_heads * config.mamba_d_head
    shared = 2 * config.mamba_n_groups * config.mamba_d_state
    return int((values + shared) * (config.mamba_d_conv - 1) + values * config.mamba_d_state)


_VALUES_PER_LAYER: Mapping[str, Callable[[TransformersConfig], int]] = {
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
    "qwen3_next": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "granitemoehybrid": _mamba2,
    "falcon_h1": _mamba2,
}
