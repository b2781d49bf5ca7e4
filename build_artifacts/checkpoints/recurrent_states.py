"""Sizes of the recurrent states of a decoder, by kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.errors import UnsupportedModel
from deployments.engines.layer_types import (
    HYBRID_LAYER,
    RECURRENT_LAYERS,
    list_layer_types,
)


def count_state_values(config: TransformersConfig) -> int:
    """Return the number of values that all recurrent states of one text have together.

    Raises UnsupportedModel for an unsupported option of the recurrent layers.
    """
    kinds = (*RECURRENT_LAYERS, HYBRID_LAYER)
    layers = sum(kind in kinds for kind in list_layer_types(config))
    return layers * _VALUES_PER_LAYER[config.model_type](config) if layers else 0


def has_known_states(config: TransformersConfig) -> bool:
    """Return whether layers of this model may have recurrent states."""
    return config.model_type in _VALUES_PER_LAYER


def has_hybrid_layers(config: TransformersConfig) -> bool:
    """Return whether all layers of this model have both attention and a recurrent state."""
    return bool(config.model_type == "falcon_h1")


def can_have_mlp_layers(config: TransformersConfig) -> bool:
    """Return whether layers of this model may be an MLP or experts, and nothing else."""
    return bool(config.model_type == "nemotron_h")


def can_lack_attention(config: TransformersConfig) -> bool:
    """Return whether a model of this type may have no layer with attention."""
    return bool(config.model_type == "mamba2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Config of the Mamba 2 layers of a model. Families have other names for these fields."""

    heads: int
    head_size: int
    groups: int  # of heads that share B and C, and of channels that are normed together
    state_size: int  # channels of B and C
    taps: int  # tokens that the convolution covers
    activation: str
    epsilon: float  # of the norm
    min_step: float = 0.0  # lower bound of the time steps


def read_mamba2_config(config: TransformersConfig) -> Mamba2Config:
    """Read the config of the Mamba 2 layers. Raises UnsupportedModel for limits of time steps."""
    if config.model_type == "nemotron_h":
        return Mamba2Config(
            heads=config.mamba_num_heads,
            head_size=config.mamba_head_dim,
            groups=config.n_groups,
            state_size=config.ssm_state_size,
            taps=config.conv_kernel,
            activation=config.mamba_hidden_act,
            epsilon=config.layer_norm_epsilon,
            # transformers ignores `time_step_limit`. It applies this bound to prompts only. The
            # graph applies it to answers, too: the reference of the gate reads them as prompts.
            min_step=config.time_step_min,
        )
    if config.time_step_limit is None or tuple(config.time_step_limit) != (0.0, float("inf")):
        raise UnsupportedModel(
            f"`time_step_limit` of the architecture `{config.model_type}` is "
            f"{config.time_step_limit}; limits of time steps are not supported",
            hint="use a model of this architecture without them",
        )
    if config.model_type == "mamba2":
        return Mamba2Config(
            heads=config.num_heads,
            head_size=config.head_dim,
            groups=config.n_groups,
            state_size=config.state_size,
            taps=config.conv_kernel,
            activation=config.hidden_act,
            epsilon=config.layer_norm_epsilon,
        )
    return Mamba2Config(
        heads=config.mamba_n_heads,
        head_size=config.mamba_d_head,
        groups=config.mamba_n_groups,
        state_size=config.mamba_d_state,
        taps=config.mamba_d_conv,
        activation=config.hidden_act,
        epsilon=config.rms_norm_eps,
    )


def _short_convolution(config: TransformersConfig) -> int:
    return int(config.hidden_size * (config.conv_L_cache - 1))


def _gated_delta_net(config: TransformersConfig) -> int:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    convolved = (2 * keys + values) * (config.linear_conv_kernel_dim - 1)
    return int(convolved + values * config.linear_key_head_dim)


def _mamba2(config: TransformersConfig) -> int:
    mamba = read_mamba2_config(config)
    values, shared = mamba.heads * mamba.head_size, 2 * mamba.groups * mamba.state_size
    return (values + shared) * (mamba.taps - 1) + values * mamba.state_size


_VALUES_PER_LAYER: Mapping[str, Callable[[TransformersConfig], int]] = {
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
    "lfm3": _short_convolution,
    "olmo_hybrid": _gated_delta_net,
    "qwen3_next": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "granitemoehybrid": _mamba2,
    "falcon_h1": _mamba2,
    "bamba": _mamba2,
    "nemotron_h": _mamba2,
    "mamba2": _mamba2,
}
