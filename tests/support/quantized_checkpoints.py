"""Checkpoints with quantized weights of any format, and their conversion."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.progress import BuildProgress
from build_artifacts.steps.convert_weights import convert_weights
from build_artifacts.workspaces.step_runner import StepRunner
from build_artifacts.workspaces.workspace import Workspace
from deployments.artifacts.manifest import ModelSource
from tests.support.tiny_encoders import write_json

# Modules whose weights published checkpoints leave in bf16.
FLOAT_MODULES = ("embed", "lm_head", "norm", "mlp.gate.", "vision", "projector", "conv")
MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"


class QuantizedTensors(NamedTuple):
    """The tensors of a quantized weight, by name, and its values."""

    stored: Mapping[str, Tensor]
    values: Tensor


def is_quantized(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and not any(part in name for part in FLOAT_MODULES)


def quantize_weights(
    directory: Path,
    quantize: Callable[[str, Tensor], QuantizedTensors],
    quantization: Mapping[str, Any],
    *,
    selects: Callable[[str, Tensor], bool] = is_quantized,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:
    """Quantize the weights of a checkpoint that `selects` names, and state it in its config.

    The others become `dtype`. Return the values of all.
    """
    path = directory / "model.safetensors"
    stored, expected = {}, {}
    for name, weight in load_file(path).items():
        if not selects(name, weight):
            stored[name] = expected[name] = weight.to(dtype)
            continue
        quantized = quantize(name, weight)
        stored |= quantized.stored
        expected[name] = quantized.values
    save_file(stored, path, {"format": "pt"})
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    edit_config(directory, quantization_config=dict(quantization), dtype=names[dtype])
    return expected


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    write_json(path, json.loads(path.read_bytes()) | changes)


def convert(
    directory: Path, into: Path, task: str = "text-generation", log: io.StringIO | None = None
) -> Checkpoint:
    """Convert the weights of a checkpoint as a build does, in the workspace `into`."""
    source = Checkpoint(directory, ModelSource(ref="here", revision="1"), "tiny/model")
    return convert_weights(
        StepRunner(Workspace(into), BuildProgress(log or io.StringIO())), source, (task,)
    )


def load_tensors(weights: Path) -> dict[str, Tensor]:
    """Return the tensors of all files of a converted checkpoint."""
    tensors: dict[str, Tensor] = {}
    for path in weights.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def write_tensors(
    directory: Path, tensors: dict[str, Tensor], quantization: Mapping[str, Any], **config: Any
) -> Path:
    """Write a checkpoint of any tensors, whose config states the quantization."""
    directory.mkdir(exist_ok=True)
    stated = {"model_type": "bert", "quantization_config": dict(quantization)}
    write_json(directory / "config.json", stated | config)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def convert_tensors(
    directory: Path, tensors: dict[str, Tensor], quantization: Mapping[str, Any], **config: Any
) -> dict[str, Tensor]:
    """Return the tensors of such a checkpoint after the conversion."""
    source = write_tensors(directory / "source", tensors, quantization, **config)
    return load_tensors(convert(source, directory / "work", "fill-mask").weights)


def draw_weight(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, atol=0, rtol=0, msg=name)
