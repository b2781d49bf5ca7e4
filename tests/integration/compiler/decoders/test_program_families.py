"""Every supported decoder architecture in torch: as a traced program, and in transformers.

Texts are longer than sliding windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from build_artifacts.checkpoints.decoders import SUPPORTED
from build_artifacts.errors import UnsupportedModel
from build_artifacts.presets import (
    DECODER_BF16_TORCH,
    DECODER_FP16_TORCH,
    DECODER_FP16_TRANSFORMERS,
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
from deployments.errors import EngineFailed
from tests.integration.compiler.checkpoints.test_gpt_oss import write_mxfp4
from tests.support import flash_attention
from tests.support.decoder_families import NEMOTRON_EXPERTS, OWN, RECURRENT, WINDOW, write_decoder
from tests.support.decoder_programs import WHOLE, program_spec, whole_spec

PROMPT = np.random.default_rng(0).integers(10, 250, 80).tolist()
FIRST_CHUNK = 50
# Architectures whose attention transformers computes without exchangeable functions.
OWN_ATTENTION = (
    "GPTNeoForCausalLM", "GPTJForCausalLM", "BloomForCausalLM", "FalconForCausalLM",
    "MptForCausalLM", "CodeGenForCausalLM", "XGLMForCausalLM",
)  # fmt: skip
LEFT_OUT = ("GPT2LMHeadModel", "Mamba2ForCausalLM", *OWN_ATTENTION)
# transformers applies the smallest time step to prompts, and not to the tokens of steps.
STEP_CHANGES = {"NemotronHForCausalLM": {"time_step_min": 1e-9}}
ARCHITECTURES = [name for name in SUPPORTED if name not in LEFT_OUT]


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
    checkpoint, expected = write(architecture, tmp_path, STEP_CHANGES.get(architecture, {}))
    whole, is_recurrent = run(whole_spec(checkpoint, tmp_path / "whole")), architecture in RECURRENT
    # Chunks of a prompt round states differently.
    np.testing.assert_allclose(whole, expected, atol=2e-4 if is_recurrent else 1e-4)
    (tmp_path / "graph").mkdir()
    if is_recurrent:
        with pytest.raises(UnsupportedModel, match="torch programs have no loops"):
            program_spec(checkpoint, tmp_path / "graph")
    else:
        found = run(program_spec(checkpoint, tmp_path / "graph"))
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_program_of_experts_in_bf16_computes_as_transformers(family: str, tmp_path: Path) -> None:
    checkpoint, expected = write(f"{family}ForCausalLM", tmp_path)
    program = run(program_spec(checkpoint, tmp_path, DECODER_BF16_TORCH))
    whole = run(whole_spec(checkpoint, tmp_path / "whole", replace(WHOLE, precision="bf16")))
    np.testing.assert_array_equal(program, whole)
    assert np.abs(program - expected).mean() < 0.15


@pytest.mark.slow
def test_checkpoint_in_mxfp4_has_its_experts(tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "checkpoint")
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", dtype="float32", quantization_config=Mxfp4Config(dequantize=True)
    )
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    spec = whole_spec(tmp_path / "checkpoint", tmp_path / "whole")
    np.testing.assert_allclose(run(spec), expected, atol=1e-4)


def test_checkpoint_without_experts_is_refused(tmp_path: Path) -> None:
    """transformers would open it with random weights."""
    checkpoint, _ = write("Qwen3MoeForCausalLM", tmp_path)
    spec = whole_spec(checkpoint, tmp_path / "whole")
    weights = load_file(spec.path)
    save_file({n: w for n, w in weights.items() if "experts" not in n}, spec.path, {"format": "pt"})
    with pytest.raises(EngineFailed, match=r"no weights for `model\.layers\.0\.mlp\.experts"):
        run(spec)


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
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # Its layers pass no window on.
        ("Qwen2Moe", {"use_sliding_window": True, "max_window_layers": 1}),
        ("Olmoe", {}),  # no field of this architecture, but its layers pass it on
    ],
)
def test_window_of_the_config_decides(
    family: str, changes: Mapping[str, Any], attention: Attention, tmp_path: Path
) -> None:
    changed = {**changes, "sliding_window": WINDOW}
    checkpoint, expected = write(f"{family}ForCausalLM", tmp_path, changed)
    recipe = replace(WHOLE, run=EngineOptions(attention=attention))
    found = run(whole_spec(checkpoint, tmp_path / "whole", recipe))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("architecture", OWN_ATTENTION)
def test_attention_that_cannot_be_exchanged_is_refused(architecture: str, tmp_path: Path) -> None:
    checkpoint, _ = write(architecture, tmp_path)
    for write_spec in (program_spec, whole_spec):
        with pytest.raises(UnsupportedModel, match=f"no exchangeable attention .*{architecture}"):
            write_spec(checkpoint, tmp_path / "engine")


def test_model_without_attention_is_refused(tmp_path: Path) -> None:
    checkpoint, _ = write("Mamba2ForCausalLM", tmp_path)
    with pytest.raises(UnsupportedModel, match="needs a layer with attention"):
        whole_spec(checkpoint, tmp_path / "engine")


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


def test_experts_without_gates_are_refused(tmp_path: Path) -> None:
    checkpoint, _ = write("NemotronHForCausalLM", tmp_path, NEMOTRON_EXPERTS)
    recipe = replace(WHOLE, precision="bf16")
    with pytest.raises(UnsupportedModel, match="experts of the form of `NemotronHForCausalLM`"):
        whole_spec(checkpoint, tmp_path / "whole", recipe)


def test_experts_have_no_fp16(tmp_path: Path) -> None:
    checkpoint, _ = write("Qwen3MoeForCausalLM", tmp_path)
    for write_spec, recipe in (
        (program_spec, DECODER_FP16_TORCH),
        (whole_spec, DECODER_FP16_TRANSFORMERS),
    ):
        with pytest.raises(UnsupportedModel, match="no fp16 kernel for the experts of `Qwen3Moe"):
            write_spec(checkpoint, tmp_path / recipe.engine, recipe)


def test_rope_by_layer_type_may_depend_on_the_length(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    changes = {"rope_parameters": {
        "sliding_attention": rope,
        "full_attention": rope | {"rope_type": "dynamic", "factor": 2.0}}}  # fmt: skip
    checkpoint, _ = write("Gemma3ForCausalLM", tmp_path, changes)
    with pytest.raises(UnsupportedModel, match="depends on the text length"):
        whole_spec(checkpoint, tmp_path / "whole")
