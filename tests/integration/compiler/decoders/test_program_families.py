"""Every supported decoder architecture in torch: as a traced program, and in transformers.

Texts are longer than sliding windows. Mixtures of experts have programs in bf16 only, which are
compared with transformers' own model in bf16 over the same slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from build_artifacts.checkpoints.architectures import has_experts, load_config
from build_artifacts.checkpoints.decoders import SUPPORTED
from build_artifacts.decoders.torch_export import export_program
from build_artifacts.errors import UnsupportedModel
from build_artifacts.presets import (
    DECODER_BF16_TORCH,
    DECODER_FP16_TORCH,
    DECODER_GPU_INT8_BNB,
    DECODER_GPU_NF4_BNB,
)
from build_artifacts.recipes import DecoderRecipe
from build_artifacts.types import FloatArray
from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Attention
from deployments.config import GeneratorSettings
from deployments.engines.decoder import DecoderSpec
from deployments.engines.pytorch.decoder import TorchDecoder
from tests.support import flash_attention
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.decoder_families import OWN, WINDOW, write_decoder
from tests.support.decoder_programs import PROGRAM, WHOLE, program_spec, whole_spec

PROMPT = np.random.default_rng(0).integers(10, 250, 80).tolist()
FIRST_CHUNK = 50
ARCHITECTURES = [name for name in SUPPORTED if name != "GPT2LMHeadModel"]


@pytest.fixture(autouse=True)
def _flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_attention.install(monkeypatch)


def write(
    architecture: str, directory: Path, changes: Mapping[str, Any] = {}
) -> tuple[Path, FloatArray]:
    """Write a tiny checkpoint. Return it with the logits of `PROMPT` in transformers, in fp32."""
    checkpoint = directory / "checkpoint"
    model = write_decoder(architecture, checkpoint, {**OWN.get(architecture, {}), **changes})
    with torch.inference_mode():
        return checkpoint, model(torch.tensor([PROMPT])).logits[0].numpy()


def run(spec: DecoderSpec) -> FloatArray:
    """Return the logits of `PROMPT` in two chunks and two steps, while another slot runs."""
    last = len(PROMPT) - 1
    decoder = TorchDecoder(spec, GeneratorSettings(), slots=2, context=128)
    try:
        decoder.prefill(0, PROMPT[::-1], 0)
        found = [decoder.prefill(1, PROMPT[:FIRST_CHUNK], 0, all_logits=True).copy()]
        rest = PROMPT[FIRST_CHUNK:-2]
        found.append(decoder.prefill(1, rest, FIRST_CHUNK, all_logits=True).copy())
        for place in (last - 1, last):
            step = np.array([3, PROMPT[place]]), np.array([last, place])
            found.append(decoder.decode(*step)[1:].copy())
        return np.concatenate(found)
    finally:
        decoder.close()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_program_matches_transformers(architecture: str, tmp_path: Path) -> None:
    checkpoint, expected = write(architecture, tmp_path)
    whole = whole_spec(checkpoint, tmp_path / "whole")
    np.testing.assert_allclose(run(whole), expected, atol=1e-4)
    graph = tmp_path / "graph"
    graph.mkdir()
    if not has_experts(load_config(checkpoint)):
        np.testing.assert_allclose(run(program_spec(checkpoint, graph)), expected, atol=1e-4)
        return
    program = program_spec(checkpoint, graph, DECODER_BF16_TORCH)
    rounded = whole_spec(checkpoint, tmp_path / "rounded", replace(WHOLE, precision="bf16"))
    np.testing.assert_array_equal(run(program), run(rounded))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize(
    "architecture", ["MistralForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"]
)
def test_other_attention_has_windows_and_soft_caps(
    architecture: str, attention: Attention, tmp_path: Path
) -> None:
    checkpoint, expected = write(architecture, tmp_path)
    recipe = replace(WHOLE, run=EngineOptions(attention=attention))
    found = run(whole_spec(checkpoint, tmp_path / "whole", recipe))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash"])
def test_window_that_a_layer_does_not_pass_on_counts(attention: Attention, tmp_path: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    checkpoint, expected = write("Qwen2MoeForCausalLM", tmp_path, changes)
    recipe = replace(WHOLE, run=EngineOptions(attention=attention))
    found = run(whole_spec(checkpoint, tmp_path / "whole", recipe))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_flash_attention_has_no_sinks(tmp_path: Path) -> None:
    checkpoint, _ = write("GptOssForCausalLM", tmp_path)
    recipe = replace(WHOLE, run=EngineOptions(attention="flash"))
    with pytest.raises(UnsupportedModel, match="attention sinks of `GptOssForCausalLM`") as caught:
        whole_spec(checkpoint, tmp_path / "whole", recipe)
    assert "--attention sdpa" in caught.value.hint


@pytest.mark.parametrize("recipe", [DECODER_GPU_NF4_BNB, DECODER_GPU_INT8_BNB])
def test_bitsandbytes_does_not_quantize_experts(recipe: DecoderRecipe, tmp_path: Path) -> None:
    checkpoint, _ = write("Qwen3MoeForCausalLM", tmp_path)
    with pytest.raises(UnsupportedModel, match="does not quantize the experts"):
        whole_spec(checkpoint, tmp_path / "whole", recipe)


@pytest.mark.parametrize("recipe", [PROGRAM, DECODER_FP16_TORCH], ids=lambda recipe: recipe.name)
def test_programs_of_experts_are_in_bf16(recipe: DecoderRecipe, tmp_path: Path) -> None:
    checkpoint, _ = write("Qwen3MoeForCausalLM", tmp_path)
    metadata = read_checkpoint_metadata(checkpoint)
    with pytest.raises(UnsupportedModel, match="experts of `Qwen3MoeForCausalLM` in bf16 only"):
        export_program(checkpoint, metadata, recipe, tmp_path / "p")
