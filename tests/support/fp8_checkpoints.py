"""Checkpoints in fp8, made from checkpoints in float types, and their values by another way."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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

FP8_MAX = 448.0
# Modules whose weights published checkpoints leave in bf16.
FLOAT_MODULES = ("embed", "lm_head", "norm", "mlp.gate.", "vision", "projector", "conv")

Blocks = tuple[int, int] | None  # rows and columns with a common scale; None: the whole matrix


def iterate_blocks(weight: Tensor, size: Blocks) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield the places and the views of the blocks of a matrix."""
    rows, columns = size or tuple(weight.shape)
    for i, row in enumerate(range(0, weight.shape[0], rows)):
        for j, column in enumerate(range(0, weight.shape[1], columns)):
            yield (i, j), weight[row : row + rows, column : column + columns]


def quantize_matrix(
    weight: Tensor, size: Blocks, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return the fp8 values and the scales, [block rows, block columns] of `dtype`."""
    rows, columns = size or tuple(weight.shape)
    scales = torch.empty(
        math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns), dtype=dtype
    )
    values = weight.detach().float().clone()
    for place, block in iterate_blocks(values, size):
        scales[place] = block.abs().max() / FP8_MAX
        block.div_(scales[place].float()).clamp_(-FP8_MAX, FP8_MAX)
    return values.to(torch.float8_e4m3fn), scales


def dequantize_matrix(values: Tensor, scales: Tensor, size: Blocks) -> Tensor:
    """Return the values in bf16, computed one block after the other."""
    result = values.float()
    for place, block in iterate_blocks(result, size):
        block.mul_(scales[place].float())
    return result.to(torch.bfloat16)


def is_quantized(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and not any(part in name for part in FLOAT_MODULES)


def quantize_checkpoint(
    directory: Path,
    size: Blocks,
    *,
    dtype: torch.dtype = torch.float32,
    selects: Callable[[str, Tensor], bool] = is_quantized,
) -> dict[str, Tensor]:
    """Put the weights of a checkpoint in fp8, in transformers' format. Return its values in bf16.

    Without `size`, the scale is a scalar, and each weight has a scale of activations beside it.
    """
    path = directory / "model.safetensors"
    stored, expected = {}, {}
    for name, weight in load_file(path).items():
        if not selects(name, weight):
            stored[name] = expected[name] = weight.to(torch.bfloat16)
            continue
        values, scales = quantize_matrix(weight, size, dtype)
        expected[name] = dequantize_matrix(values, scales, size)
        stored |= {name: values, f"{name}_scale_inv": scales if size else scales.reshape(())}
        if size is None:
            stored[name.replace(".weight", ".activation_scale")] = torch.tensor(0.5, dtype=dtype)
    save_file(stored, path, {"format": "pt"})
    scheme = "dynamic" if size else "static"
    block_size = None if size is None else list(size)
    quantization = {"activation_scheme": scheme, "weight_block_size": block_size}
    edit_config(directory, quantization_config=quantization | {"quant_method": "fp8"})
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
