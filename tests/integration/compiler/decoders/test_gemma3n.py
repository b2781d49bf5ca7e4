"""Gemma 3n: several versions of the hidden states, sparse activations, and whole checkpoints."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import Gemma3nConfig

from build_artifacts.recipes import DECODER_FP32
from deployments.config import GeneratorSettings
from deployments.engines.onnx.decoder import OnnxDecoder
from tests.integration.compiler.decoders.test_families import (
    check_export,
    check_logits,
    compute_logits,
    export_graph,
    quantize,
    run_graph,
)
from tests.integration.compiler.decoders.test_text_models import extract
from tests.support.decoder_families import OWN, write_decoder

ARCHITECTURE = "Gemma3nForCausalLM"
GEMMA3N = OWN[ARCHITECTURE]
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "activation_sparsity_pattern": [0.95] * 6}
RANDOM = np.random.default_rng(0)
PROMPT, OTHER = (RANDOM.integers(8, 250, tokens).tolist() for tokens in (60, 30))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"altup_num_inputs": 3, "altup_active_idx": 1, "num_kv_shared_layers": 0},
        {"altup_correct_scale": False, "tie_word_embeddings": False, "attention_bias": True},
        {"vocab_size_per_layer_input": 300, "activation_sparsity_pattern": [0.0] * 6},
    ],
    ids=["versions", "own head", "large table"],
)
def test_variant_matches_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    check_export(tmp_path, ARCHITECTURE, GEMMA3N | changes)


@pytest.mark.slow
def test_logits_are_batch_and_chunk_invariant(tmp_path: Path) -> None:
    """The graph has means over channels, and small products in fp32."""
    write_decoder(ARCHITECTURE, tmp_path / "checkpoint", GEMMA3N | WIDE)
    spec = quantize(export_graph(tmp_path, DECODER_FP32), tmp_path)
    settings = GeneratorSettings(intra_op_threads=2)
    with closing(OnnxDecoder(spec, settings, slots=2, context=128)) as engine:
        whole = engine.prefill(0, PROMPT, 0).copy()
        alone = engine.decode(np.array([9]), np.array([60])).copy()
        engine.prefill(0, OTHER, 0)
        engine.prefill(1, PROMPT[:44], 0)
        np.testing.assert_array_equal(engine.prefill(1, PROMPT[44:], 44), whole)
        both = engine.decode(np.array([5, 9]), np.array([30, 60]))
        np.testing.assert_array_equal(both[1], alone[0])


@pytest.mark.slow
def test_text_model_of_a_whole_checkpoint_is_built(tmp_path: Path) -> None:
    """The image encoder of the whole model is in another package, so the test writes its names."""
    whole = tmp_path / "whole"
    model = write_decoder(ARCHITECTURE, whole, GEMMA3N)
    weights = load_file(whole / "model.safetensors")
    named = {f"model.language_{name}": tensor for name, tensor in weights.items()}
    others = ("model.vision_tower.a", "model.audio_tower.a", "model.embed_vision.embedding.weight")
    named |= dict.fromkeys(others, weights["model.norm.weight"].clone())
    save_file({name: tensor.clone() for name, tensor in named.items()}, whole / "model.safetensors")
    config = Gemma3nConfig(
        text_config=model.config.to_dict(),
        architectures=["Gemma3nForConditionalGeneration"],
        eos_token_id=7,
    )
    config.save_pretrained(whole)
    extract(tmp_path)
    ids, expected = compute_logits(model)
    check_logits(run_graph(export_graph(tmp_path, DECODER_FP32), ids), expected, 1e-4)
