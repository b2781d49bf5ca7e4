"""Projection of pooled vectors: the Dense modules of sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    corrupt_file_error,
    is_plain_file,
    read_field,
    read_object,
)
from build_artifacts.checkpoints.checks import check_weights
from build_artifacts.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch

_WEIGHTS = "model"
# Supported classes of torch.nn. `activation_function` in the config is the import path of a class.
_ACTIVATIONS = ("GELU", "Identity", "ReLU", "Sigmoid", "SiLU", "Tanh")
_POOLED = "sentence_embedding"  # sentence-transformers' name for the pooled vector


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer and an activation: `activation(weight @ vector + bias)`."""

    weight: NDArray[np.float32] = field(repr=False)  # [out, in]
    bias: NDArray[np.float32] | None = field(repr=False)  # [out]
    activation: str  # class of torch.nn

    @property
    def width(self) -> int:
        return len(self.weight)


def read_dense_layer(directory: Path, input_width: int) -> DenseLayer:
    """Read a Dense module. Take its shape from the weights, not from the config.

    Raises UnsupportedModel if the build does not support the activation, a residual connection, the
    input or the output, or if the weights do not fit `input_width`. Also raises the errors of
    `check_weights`.
    """
    config = directory / CONFIG_NAME
    name = read_field(config, "activation_function", str) or "torch.nn.modules.activation.Tanh"
    activation = name.rpartition(".")[2]
    if not name.startswith("torch.nn.") or activation not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"the Dense module `{directory.name}` has the unsupported activation `{name}`",
            hint=f"supported: {', '.join(_ACTIVATIONS)} of torch.nn",
        )
    check_module_names(directory)
    if read_object(config).get("use_residual"):
        raise UnsupportedModel(
            f"the Dense module `{directory.name}` adds its input to its output (`use_residual`)",
            hint="use a model without residual connections between its modules",
        )
    weight, bias = _read_weights(directory)
    path = directory / f"{_WEIGHTS}.safetensors"
    if weight.ndim != 2 or weight.shape[1] != input_width:
        shape = list(weight.shape)
        raise corrupt_file_error(
            path, f"`linear.weight` of shape {shape} does not fit {input_width} values"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise corrupt_file_error(path, f"`linear.bias` has the shape {list(bias.shape)}")
    return DenseLayer(weight, bias, activation)


def check_module_names(directory: Path) -> None:
    """Raise UnsupportedModel unless a Dense or Normalize module replaces the pooled vectors."""
    config = directory / CONFIG_NAME
    source = read_field(config, "module_input_name", str) or _POOLED
    target = read_field(config, "module_output_name", str) or source
    for name, verb in ((source, "reads"), (target, "writes")):
        if name != _POOLED:
            raise UnsupportedModel(
                f"the module `{directory.name}` {verb} `{name}` instead of pooled vectors",
                hint="use a model that only changes its vectors after it pools them",
            )


def _read_weights(directory: Path) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    from safetensors.torch import load_file  # numpy has no bfloat16

    check_weights(directory, _WEIGHTS)
    path = directory / f"{_WEIGHTS}.safetensors"
    if not is_plain_file(path):
        raise corrupt_file_error(
            directory / CONFIG_NAME, "the weights of a Dense module are in shards"
        )
    arrays = {name: tensor.float().numpy() for name, tensor in load_file(path).items()}
    if "linear.weight" not in arrays:
        raise corrupt_file_error(path, "`linear.weight` is missing")
    return arrays["linear.weight"], arrays.get("linear.bias")


def build_projection(layers: Sequence[DenseLayer]) -> torch.nn.Module:
    """Build the module that applies `layers` to float32 vectors [B, in]."""
    import torch

    modules: list[Any] = []
    for layer in layers:
        out, width = layer.weight.shape
        linear = torch.nn.Linear(width, out, bias=layer.bias is not None)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(layer.weight))
            if layer.bias is not None:
                linear.bias.copy_(torch.from_numpy(layer.bias))
        modules += [linear, getattr(torch.nn, layer.activation)()]
    return torch.nn.Sequential(*modules).eval().requires_grad_(False)
