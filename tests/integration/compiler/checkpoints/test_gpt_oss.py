"""GPT-OSS: the ends of its turns, and checkpoints in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file, save_file

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.checkpoints.architectures import check_unquantized, load_config
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.models import count_parameters, load_model
from build_artifacts.decoders.int8_kv_cache import has_int8_kv_cache
from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipes import DECODER_FP32
from build_artifacts.steps.merge import merge
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.types import ModelHead
from deployments.generation.harmony import CHANNEL, END, MESSAGE, START
from tests.integration.compiler.decoders.test_families import (
    check_logits,
    compute_logits,
    export_graph,
    mean_cosine,
    quantize,
    run_graph,
)
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.decoder_artifacts import write_byte_tokenizer
from tests.support.decoder_families import OWN, write_decoder
from tests.support.tiny_encoders import write_json

ARCHITECTURE = "GptOssForCausalLM"
QUANTIZED = {
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
}


def write_mxfp4(directory: Path) -> None:
    """Write a tiny checkpoint whose experts are random values of MXFP4."""
    write_decoder(ARCHITECTURE, directory, OWN[ARCHITECTURE])
    weights = load_file(directory / "model.safetensors")
    random = np.random.default_rng(0)
    for name in [each for each in weights if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, size, rows = weights.pop(name).shape
        shape = experts, rows, size // 32
        weights[f"{name}_blocks"] = random.integers(0, 256, (*shape, 16), np.uint8)
        weights[f"{name}_scales"] = random.integers(119, 124, shape, np.uint8)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    change_config(directory, QUANTIZED)


def change_config(directory: Path, changes: dict[str, Any]) -> None:
    config = json.loads((directory / "config.json").read_bytes())
    write_json(directory / "config.json", config | changes)


@pytest.mark.slow
def test_mxfp4_weights_are_those_of_transformers(tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "checkpoint")
    model = load_model(tmp_path / "checkpoint", head=ModelHead.NEXT_TOKEN, dtype="float32")
    assert count_parameters(tmp_path / "checkpoint") == model.num_parameters()
    graph = export_graph(tmp_path, DECODER_FP32)
    ids, expected = compute_logits(model)
    check_logits(run_graph(graph, ids), expected, 1e-4)
    int8 = quantize(graph, tmp_path)
    assert mean_cosine(run_graph(int8, ids), expected) > 0.95
    assert not has_int8_kv_cache(int8.path), "the attention of an int8 cache has no sinks"


@pytest.mark.slow
def test_adapter_is_merged_into_mxfp4_weights(tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "base")
    base = load_model(tmp_path / "base", head=ModelHead.NEXT_TOKEN, dtype="float32")
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    source = Checkpoint(tmp_path / "base", ModelSource(ref="here", revision="1"), "tiny/model")
    merge(source, read_adapter(tmp_path / "adapter"), tmp_path / "checkpoint")
    ids, expected = compute_logits(adapted.eval())
    check_logits(run_graph(export_graph(tmp_path, DECODER_FP32), ids), expected, 1e-4)


def test_other_quantized_weights_are_rejected(tmp_path: Path) -> None:
    write_decoder(ARCHITECTURE, tmp_path / "checkpoint", OWN[ARCHITECTURE])
    change_config(tmp_path / "checkpoint", QUANTIZED)
    check_unquantized(load_config(tmp_path / "checkpoint"))
    for changes in (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        QUANTIZED | {"model_type": "llama"},
    ):
        change_config(tmp_path / "checkpoint", changes)
        with pytest.raises(UnsupportedModel, match="the checkpoint is quantized"):
            check_unquantized(load_config(tmp_path / "checkpoint"))


def test_turns_end_at_the_last_message(tmp_path: Path) -> None:
    """<|end|> ends each message of a turn, in templates of other models the turn."""
    names = ("<|return|>", "<|call|>", START, CHANNEL, MESSAGE, END)
    checkpoint = tmp_path / "checkpoint"
    write_decoder(ARCHITECTURE, checkpoint, OWN[ARCHITECTURE] | {"vocab_size": 300})
    tokenizer = write_byte_tokenizer(checkpoint / "tokenizer.json", names)
    template = "".join(names)
    ends = [tokenizer.token_to_id(name) for name in ("<|return|>", "<|call|>")]
    for written, expected in (
        (template, ends),
        (template.replace(CHANNEL, ""), [tokenizer.token_to_id(END)]),
    ):
        (checkpoint / "chat_template.jinja").write_text(written, encoding="utf-8")
        generation_config = read_checkpoint_metadata(checkpoint).generation_config
        assert generation_config is not None
        assert generation_config.eos_token_ids == (7, *expected)
