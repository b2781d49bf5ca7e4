"""Conditions on configs, by which variants of an architecture differ."""

from __future__ import annotations

from collections.abc import Callable

from build_artifacts.checkpoints.architectures import TransformersConfig
from deployments.engines.pytorch.layer_types import read_windows

ConfigFlag = Callable[[TransformersConfig], bool]
LayerFlag = Callable[[TransformersConfig, int], bool]  # takes the config and a layer number
ConfigFactor = Callable[[TransformersConfig], float]


def read_activation(config: TransformersConfig) -> str:
    """Return the activation of the MLPs. LFM2's configs do not declare it, Gemma's rename it."""
    if config.model_type in ("lfm2", "lfm2_moe"):
        return "silu"
    is_gemma = hasattr(type(config), "hidden_activation")
    return str(config.hidden_activation if is_gemma else config.hidden_act)


def never(_: TransformersConfig) -> bool:
    return False


def always(_: TransformersConfig) -> bool:
    return True


def everywhere(_: TransformersConfig, __: int) -> bool:
    return True


def has_window(config: TransformersConfig, layer: int) -> bool:
    return read_windows(config)[layer] is not None


def has_window_if_any(config: TransformersConfig, layer: int) -> bool:
    return config.sliding_window is None or has_window(config, layer)


def has_base(config: TransformersConfig, layer: int) -> bool:
    return bool(config.layer_rope_theta[layer])  # 0 for layers without RoPE
