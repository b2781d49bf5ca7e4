"""Tiny checkpoints as torch programs and as transformers models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.decoders.torch_export import export_checkpoint, export_program
from build_artifacts.recipes import DecoderRecipe
from deployments.artifacts.types import Device
from deployments.engines.decoder import DecoderSpec
from tests.support.checkpoint_metadata import read_checkpoint_metadata

PROGRAM = DecoderRecipe(name="gpu-fp32-torch", device=Device.GPU, precision="fp32", engine="torch")
WHOLE = replace(PROGRAM, name="gpu-fp32-transformers", engine="transformers")


def program_spec(
    checkpoint: Path,
    into: Path,
    recipe: DecoderRecipe = PROGRAM,
    *,
    broken_token: int | None = None,
) -> DecoderSpec:
    """Export the traced torch program of a checkpoint, with its weights, to `into`.

    `broken_token` gets a NaN embedding.
    """
    metadata, path = read_checkpoint_metadata(checkpoint), into / "model.safetensors"
    export_program(checkpoint, metadata, recipe, path)
    if broken_token is not None:
        _break(path, broken_token)
    return spec_of(path, metadata, recipe)


def whole_spec(checkpoint: Path, into: Path, recipe: DecoderRecipe = WHOLE) -> DecoderSpec:
    """Export a checkpoint for the engine `transformers` to `into`. Return its spec."""
    metadata = read_checkpoint_metadata(checkpoint)
    export_checkpoint(checkpoint, metadata, recipe, into)
    return spec_of(into / "model.safetensors", metadata, recipe)


def spec_of(path: Path, metadata: CheckpointMetadata, recipe: DecoderRecipe) -> DecoderSpec:
    return DecoderSpec(
        path=path,
        engine=recipe.engine,
        device=recipe.device,
        precision=recipe.precision,
        options=recipe.run,
        generation_config=metadata.required_generation_config,
        vocabulary=metadata.output_width,
        max_tokens=metadata.max_tokens,
    )


def _break(path: Path, token: int) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, framework="pt") as file:
        metadata: dict[str, Any] = file.metadata()
    weights = load_file(path)
    (name,) = (name for name in weights if "embed_tokens" in name)
    weights[name][token] = float("nan")
    save_file(weights, path, metadata=metadata)
