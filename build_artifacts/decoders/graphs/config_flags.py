"""Conditions on configs, by which variants of an architecture differ."""

from __future__ import annotations

from collections.abc import Callable

from build_artifacts.checkpoints.architectures import TransformersConfig

ConfigFlag = Callable[[TransformersConfig], bool]
LayerFlag = Callable[[TransformersConfig, int], bool]  # takes the config and a layer number
ConfigFactor = Callable[[TransformersConfig], float]


def read_activation(config: TransformersConfig) -> str:
    """Return the activation of the MLPs. LFM2's configs do not declare it."""
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
