"""Conditions on configs, by which variants of an architecture differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import attrgetter

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.errors import UnsupportedModel
from deployments.engines.layer_types import read_windows

ConfigFlag = Callable[[TransformersConfig], bool]
ConfigFactor = Callable[[TransformersConfig], float]
# A condition and a factor that depend on the number of a layer, too.
LayerFlag = Callable[[TransformersConfig, int], bool]
LayerFactor = Callable[[TransformersConfig, int], float]

# Activations of model types whose configs have no field for it.
_ACTIVATIONS = {
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), "silu"),
    "bloom": "gelu_pytorch_tanh",
    "mpt": "gelu",
}
# Names of that field in the configs of all other types, which declare one of them.
_ACTIVATION_FIELDS = (
    "hidden_activation", "hidden_act", "activation_function", "activation", "mlp_hidden_act",
)  # fmt: skip


def read_activation(config: TransformersConfig) -> str:
    """Return the activation of the MLPs."""
    if config.model_type in _ACTIVATIONS:
        return _ACTIVATIONS[config.model_type]
    # config.json may have further fields, which transformers ignores.
    declared = [name for name in _ACTIVATION_FIELDS if hasattr(type(config), name)]
    assert len(declared) == 1, f"bug: `{config.model_type}` declares the activations {declared}"
    return str(getattr(config, declared[0]))


def check_options(config: TransformersConfig, only: Mapping[str, object]) -> None:
    """Raise UnsupportedModel for config fields with other values than their only supported ones.

    None, false and 0 are the same.
    """
    for name, supported in only.items():
        value = attrgetter(name)(config)
        if value != supported and (value or supported):
            raise UnsupportedModel(
                f"`{name}` of the architecture `{config.model_type}` is not supported with the "
                f"value {json.dumps(value)}",
                hint=f"use a model of this architecture with the value {json.dumps(supported)}",
            )


def is_set(field: str) -> ConfigFlag:
    """Return the condition that the config has a true value in `field`."""
    return lambda config: bool(getattr(config, field))


def never(_: TransformersConfig) -> bool:
    return False


def always(_: TransformersConfig) -> bool:
    return True


def everywhere(_: TransformersConfig, __: int) -> bool:
    return True


def nowhere(_: TransformersConfig, __: int) -> bool:
    return False


def has_window(config: TransformersConfig, layer: int) -> bool:
    return read_windows(config)[layer] is not None


def has_window_if_any(config: TransformersConfig, layer: int) -> bool:
    return config.sliding_window is None or has_window(config, layer)


def has_base(config: TransformersConfig, layer: int) -> bool:
    return bool(config.layer_rope_theta[layer])  # 0 for layers without RoPE
