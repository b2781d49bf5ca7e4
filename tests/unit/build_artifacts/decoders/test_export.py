from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.decoders.export import export_decoder
from build_artifacts.decoders.graphs.decoder_variant import DecoderVariant
from build_artifacts.decoders.graphs.export import find_graph_family
from build_artifacts.decoders.graphs.llama_variants import LLAMA, QWEN3, SMOLLM3
from build_artifacts.errors import UnsupportedModel
from build_artifacts.presets import DECODER_FP16, DECODER_GPU_INT4, DECODER_GPU_INT8
from build_artifacts.recipes import DecoderRecipe
from deployments.artifacts.types import TaskName


@pytest.mark.parametrize("model_type", ["gpt2", "bart", "t5"])
@pytest.mark.parametrize("recipe", [DECODER_FP16, DECODER_GPU_INT8, DECODER_GPU_INT4])
def test_graphs_that_compute_in_fp32_are_not_built_for_a_gpu(
    model_type: str, recipe: DecoderRecipe, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    metadata = CheckpointMetadata(
        tasks=(TaskName.TEXT_GENERATION,), architecture="A", max_tokens=8, output_width=8
    )
    with pytest.raises(UnsupportedModel, match=f"`{recipe.name}`: .* compute in fp32") as caught:
        export_decoder(tmp_path, metadata, recipe, tmp_path)
    assert "encoder-decoder models run on the CPU only" in caught.value.hint


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "llama"}, None),
        ({"model_type": "llama", "rope_scaling": None}, None),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}}, None),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}}, LLAMA),
        ({"model_type": "qwen3", "rope_scaling": {"type": "yarn"}}, QWEN3),
        (
            {
                "model_type": "qwen3",
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"rope_type": "yarn"},
            },
            QWEN3,
        ),
        ({"model_type": "gemma", "rope_scaling": {"type": "linear"}}, None),
        ({"model_type": "smollm3"}, SMOLLM3),
        ({}, None),
    ],
)
def test_architecture_and_rope_select_the_graph_builder(
    config: dict[str, Any], family: DecoderVariant | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_graph_family(tmp_path) is family
