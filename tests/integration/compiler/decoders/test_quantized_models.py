"""Models with quantized weights, compared with models of the same values in float types."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.checkpoints.models import load_model
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.presets import DECODER_INT8
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import DECODER_FP32, BuildRecipe
from build_artifacts.steps.merge import merge
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead
from tests.integration.compiler.decoders.test_families import (
    check_logits,
    compute_logits,
    export_graph,
    run_graph,
)
from tests.integration.compiler.decoders.test_text_models import write_model
from tests.support.decoder_families import OWN, write_decoder
from tests.support.quantized_checkpoints import (
    check_equal,
    convert,
    edit_config,
    is_quantized,
    load_tensors,
)
from tests.support.quantized_formats import FORMATS, quantize_format
from tests.support.tiny_encoders import tiny_checkpoint

pytestmark = pytest.mark.slow


def load_weights(weights: Path) -> dict[str, Tensor]:
    """Return the weights of the model that transformers loads."""
    model = load_model(weights, head=ModelHead.NEXT_TOKEN, dtype="float32")
    return dict(model.state_dict())


@pytest.mark.parametrize("name", FORMATS)
def test_decoder_has_the_values_of_its_quantized_weights(name: str, tmp_path: Path) -> None:
    write_decoder("LlamaForCausalLM", tmp_path / "source", {})
    expected = quantize_format(tmp_path / "source", name)
    log = io.StringIO()
    weights = convert(tmp_path / "source", tmp_path / "work", log=log).weights
    found = load_weights(weights)
    assert found.keys() == expected.keys()
    for each, values in expected.items():
        torch.testing.assert_close(found[each], values.float(), atol=0, rtol=0, msg=each)
    dtype = "fp16" if FORMATS[name].dtype == torch.float16 else "bf16"
    assert f" to {dtype}" in log.getvalue()


def test_mixture_of_experts_has_a_module_per_expert(tmp_path: Path) -> None:
    write_decoder("Qwen3MoeForCausalLM", tmp_path / "source", OWN["Qwen3MoeForCausalLM"])
    expected = quantize_format(tmp_path / "source", "gptq")
    experts = [each for each in expected if ".experts." in each]
    assert len(experts) == 2 * 8 * 3
    weights = convert(tmp_path / "source", tmp_path / "work").weights
    check_equal(load_tensors(weights), expected)
    load_weights(weights)


def test_head_may_be_quantized(tmp_path: Path) -> None:
    write_decoder("LlamaForCausalLM", tmp_path / "source", {})
    expected = quantize_format(
        tmp_path / "source",
        "compressed-int4",
        selects=lambda name, weight: is_quantized(name, weight) or "lm_head" in name,
    )
    weights = convert(tmp_path / "source", tmp_path / "work").weights
    check_equal(load_tensors(weights), expected)
    head = load_weights(weights)["lm_head.weight"]
    torch.testing.assert_close(head, expected["lm_head.weight"].float(), atol=0, rtol=0)


def test_tied_head_stays_tied(tmp_path: Path) -> None:
    options = OWN["Qwen3ForCausalLM"] | {"tie_word_embeddings": True}
    write_decoder("Qwen3ForCausalLM", tmp_path / "source", options)
    expected = quantize_format(tmp_path / "source", "bnb-nf4")
    assert "lm_head.weight" not in expected
    found = load_weights(convert(tmp_path / "source", tmp_path / "work").weights)
    assert torch.equal(found["lm_head.weight"], expected["model.embed_tokens.weight"].float())


def test_text_model_of_a_checkpoint_with_images(tmp_path: Path) -> None:
    """Its text model may state the quantization."""
    write_model("llava", tmp_path / "source")
    expected = quantize_format(tmp_path / "source", "awq")
    config = json.loads((tmp_path / "source" / "config.json").read_bytes())
    text = config["text_config"] | {"quantization_config": config["quantization_config"]}
    edit_config(tmp_path / "source", quantization_config=None, text_config=text)
    found = load_weights(convert(tmp_path / "source", tmp_path / "work").weights)
    name = "layers.0.mlp.up_proj.weight"
    (values,) = (each for key, each in expected.items() if key.endswith(name))
    torch.testing.assert_close(found[f"model.{name}"], values.float(), atol=0, rtol=0)


def test_encoder_is_converted(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "bert")
    expected = quantize_format(source, "bnb-int8")
    weights = convert(source, tmp_path / "work", "feature-extraction").weights
    check_equal(load_tensors(weights), expected)
    load_model(weights, head=ModelHead.VECTOR, dtype="float32")


@pytest.mark.parametrize("bits", [4, 8])
def test_checkpoint_that_transformers_saved_with_bitsandbytes(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    write_decoder("LlamaForCausalLM", tmp_path / "float", {"intermediate_size": 128})
    options = (
        {"load_in_8bit": True}
        if bits == 8
        else {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.bfloat16,
        }
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float",
        dtype=torch.bfloat16,
        device_map="cpu",
        quantization_config=transformers.BitsAndBytesConfig(**options),
    )
    model.save_pretrained(tmp_path / "source")
    found = load_weights(convert(tmp_path / "source", tmp_path / "work").weights)
    expected = model.dequantize(dtype=torch.bfloat16).state_dict()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        # The library multiplies int8 by the scale and by 1 / 127, one after the other.
        tolerance = 0 if bits == 4 else 2**-8
        torch.testing.assert_close(found[name], values.float(), atol=0, rtol=tolerance, msg=name)


def test_adapter_is_merged_into_weights_of_bitsandbytes(tmp_path: Path) -> None:
    write_decoder("Qwen3ForCausalLM", tmp_path / "source", OWN["Qwen3ForCausalLM"])
    quantize_format(tmp_path / "source", "bnb-nf4")
    base = convert(tmp_path / "source", tmp_path)
    model = load_model(base.weights, head=ModelHead.NEXT_TOKEN, dtype="float32")
    options = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"])
    adapted = get_peft_model(model, options)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    merge(base, read_adapter(tmp_path / "adapter"), tmp_path / "checkpoint")
    ids, expected = compute_logits(adapted.eval())
    check_logits(run_graph(export_graph(tmp_path, DECODER_FP32), ids), expected, 1e-4)


def build_int8(source: Path, store: Path) -> tuple[ArtifactManifest, str]:
    """Build the int8 decoder. Return its manifest and the log."""
    request = BuildRequest(
        ref=str(source),
        store=store,
        recipe=BuildRecipe(candidates=(), decoders=(DECODER_INT8,)),
        budget=BuildBudget(tune_seconds=0),
    )
    log = io.StringIO()
    return build(request, BuildProgress(log)).manifest, log.getvalue()


def test_build_of_gptq_is_that_of_its_values(tmp_path: Path) -> None:
    """The reference has the same perplexity, and the sealed files have the same digests."""
    write_decoder("LlamaForCausalLM", tmp_path / "quantized", {})
    shutil.copytree(tmp_path / "quantized", tmp_path / "float")
    values = quantize_format(tmp_path / "quantized", "gptq")
    save_file(values, tmp_path / "float" / "model.safetensors", {"format": "pt"})
    found, log = build_int8(tmp_path / "quantized", tmp_path / "store")
    expected, _ = build_int8(tmp_path / "float", tmp_path / "store")
    assert "weights in GPTQ with 4 bits to fp16" in log
    assert [candidate.name for candidate in found.candidates] == ["cpu-int8"]
    assert found.scores == expected.scores
    assert found.files == expected.files
