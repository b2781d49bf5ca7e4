"""Decoders in fp8, compared with transformers, which makes their weights bf16 on a CPU."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.checkpoints.models import load_model
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import DECODER_FP32, BuildRecipe
from build_artifacts.steps.merge import merge
from deployments.artifacts.types import ModelHead
from tests.integration.compiler.decoders.test_families import (
    TOKENS,
    check_logits,
    compute_logits,
    export_graph,
    run_graph,
)
from tests.integration.compiler.decoders.test_text_models import MINISTRAL3, write_model
from tests.support.decoder_families import OWN, write_decoder
from tests.support.fp8_checkpoints import Blocks, quantize_checkpoint, quantize_matrix
from tests.support.quantized_checkpoints import convert, edit_config, is_quantized

pytestmark = pytest.mark.slow


def load_source(directory: Path, loader: Any = transformers.AutoModelForCausalLM) -> Any:
    """Load a checkpoint in fp8 with transformers, in bf16 and then in fp32."""
    options = transformers.FineGrainedFP8Config(dequantize=True)
    model = loader.from_pretrained(directory, dtype=torch.bfloat16, quantization_config=options)
    return model.float().eval()


def check_values(found: Any, expected: Any) -> None:
    """Check that two models have equal weights."""
    weights = expected.state_dict()
    assert found.state_dict().keys() == weights.keys()
    for name, weight in found.state_dict().items():
        torch.testing.assert_close(weight, weights[name], atol=0, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("architecture", "size", "dtype"),
    [
        ("Qwen3ForCausalLM", (32, 32), torch.bfloat16),
        ("Qwen3ForCausalLM", None, torch.float32),
        ("Qwen3MoeForCausalLM", (32, 32), torch.bfloat16),
        ("Qwen3_5MoeForCausalLM", (16, 16), torch.bfloat16),
        ("DeepseekV3ForCausalLM", (8, 8), torch.float32),
        ("MiniMaxM2ForCausalLM", (32, 32), torch.float32),
        ("Glm4MoeForCausalLM", (32, 32), torch.float32),
    ],
)
def test_weights_are_those_of_transformers(
    architecture: str, size: Blocks, dtype: torch.dtype, tmp_path: Path
) -> None:
    write_decoder(architecture, tmp_path / "source", OWN[architecture])
    quantize_checkpoint(tmp_path / "source", size, dtype=dtype)
    weights = convert(tmp_path / "source", tmp_path).weights
    model = load_source(tmp_path / "source")
    check_values(load_model(weights, head=ModelHead.NEXT_TOKEN, dtype="float32"), model)
    weights.rename(tmp_path / "checkpoint")
    ids, expected = compute_logits(model)
    check_logits(run_graph(export_graph(tmp_path, DECODER_FP32), ids), expected, 1e-4)


def join_experts(directory: Path, size: tuple[int, int]) -> dict[str, Tensor]:
    """Put the experts of a checkpoint in fp8, of each layer in two tensors with scales.

    Return the weights of transformers' model.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    stored = dict(model.state_dict())
    for name in [each for each in stored if ".experts." in each]:
        pairs = [quantize_matrix(weight, size) for weight in stored.pop(name)]
        stored[name] = torch.stack([values for values, _ in pairs])
        stored[f"{name}_scale_inv"] = torch.stack([scales for _, scales in pairs])
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "fp8", "weight_block_size": list(size)}
    edit_config(directory, quantization_config=quantization)
    return stored


def test_experts_in_one_tensor_become_a_graph(tmp_path: Path) -> None:
    """Such names are those of transformers' own modules."""
    architecture = "Qwen3MoeForCausalLM"
    write_decoder(architecture, tmp_path / "source", OWN[architecture])
    stored = join_experts(tmp_path / "source", (48, 32))
    weights = convert(tmp_path / "source", tmp_path).weights
    model = load_model(weights, head=ModelHead.NEXT_TOKEN, dtype="float32")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    scales = stored[f"{name}_scale_inv"].repeat_interleave(48, 1).repeat_interleave(32, 2)
    scaled = stored[name].float() * scales[:, : stored[name].shape[1]]
    expected = scaled.to(torch.bfloat16).float()
    torch.testing.assert_close(model.state_dict()[name], expected, atol=0, rtol=0)
    weights.rename(tmp_path / "checkpoint")
    ids, logits = compute_logits(model)
    check_logits(run_graph(export_graph(tmp_path, DECODER_FP32), ids), logits, 1e-4)


@pytest.mark.parametrize("size", [None, (16, 16)], ids=["tensor", "blocks"])
def test_text_model_of_a_checkpoint_with_images(size: Blocks, tmp_path: Path) -> None:
    """Ministral 3 has one scale for each weight, and others for activations."""
    write_model("mistral3", tmp_path / "source", MINISTRAL3)
    quantize_checkpoint(tmp_path / "source", size, dtype=torch.bfloat16)
    log = io.StringIO()
    weights = convert(tmp_path / "source", tmp_path, log=log).weights
    assert log.getvalue().index("fp8 to bf16") < log.getvalue().index("without image inputs")
    model = load_source(tmp_path / "source", transformers.AutoModelForImageTextToText)
    weights.rename(tmp_path / "checkpoint")
    ids = np.random.default_rng(0).integers(8, model.config.text_config.vocab_size, TOKENS)
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    check_logits(run_graph(export_graph(tmp_path, DECODER_FP32), ids), expected, 2e-4)


def write_compressed(directory: Path) -> dict[str, Tensor]:
    """Write a Llama in the format of compressed-tensors, with a scale per row.

    Return its weights in bf16.
    """
    write_decoder("LlamaForCausalLM", directory, {})
    stored, expected = {}, {}
    for name, weight in load_file(directory / "model.safetensors").items():
        stored[name] = expected[name] = weight.to(torch.bfloat16)
        if is_quantized(name, weight):
            values, scales = quantize_matrix(weight, (1, weight.shape[1]), torch.bfloat16)
            stored |= {name: values, f"{name}_scale": scales}
            expected[name] = (values.float() * scales.float()).to(torch.bfloat16)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    scheme = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
    quantization = {"format": "float-quantized", "config_groups": groups, "ignore": ["lm_head"]}
    edit_config(
        directory, quantization_config=quantization | {"quant_method": "compressed-tensors"}
    )
    return expected


def test_build_of_a_checkpoint_in_fp8(tmp_path: Path) -> None:
    expected = write_compressed(tmp_path / "source")
    weights = convert(tmp_path / "source", tmp_path).weights
    model = load_model(weights, head=ModelHead.NEXT_TOKEN, dtype="float32")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected[name].float(), atol=0, rtol=0, msg=name)
    request = BuildRequest(
        ref=str(tmp_path / "source"),
        store=tmp_path / "store",
        recipe=BuildRecipe(candidates=(), decoders=(DECODER_FP32,)),
        budget=BuildBudget(tune_seconds=0),
    )
    log = io.StringIO()
    manifest = build(request, BuildProgress(log)).manifest
    assert "weights in fp8 to bf16" in log.getvalue()
    assert [candidate.name for candidate in manifest.candidates] == ["cpu-fp32"]
    weights.rename(tmp_path / "checkpoint")
    ids, logits = compute_logits(model)
    check_logits(run_graph(export_graph(tmp_path, DECODER_FP32), ids), logits, 1e-4)


def test_adapter_is_merged_into_weights_of_fp8(tmp_path: Path) -> None:
    write_decoder("Qwen3ForCausalLM", tmp_path / "source", OWN["Qwen3ForCausalLM"])
    quantize_checkpoint(tmp_path / "source", (32, 32))
    options = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"])
    adapted = get_peft_model(load_source(tmp_path / "source"), options)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    base = convert(tmp_path / "source", tmp_path)
    merge(base, read_adapter(tmp_path / "adapter"), tmp_path / "checkpoint")
    ids, expected = compute_logits(adapted.eval())
    check_logits(run_graph(export_graph(tmp_path, DECODER_FP32), ids), expected, 1e-4)
