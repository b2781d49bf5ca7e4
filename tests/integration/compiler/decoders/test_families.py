"""Comparison of every supported decoder architecture with transformers.

Texts are longer than sliding windows, so that a graph without the window differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from build_artifacts.checkpoints.architectures import WINDOW_IN_ALL_LAYERS
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.decoders import SUPPORTED
from build_artifacts.checkpoints.metadata import select_tasks
from build_artifacts.decoders.export import export_decoder
from build_artifacts.decoders.logits_slicing import GRAPH_NAME
from build_artifacts.families import read_metadata
from build_artifacts.presets import DECODER_FP16
from build_artifacts.recipes import DECODER_FP32, DecoderRecipe
from deployments.artifacts.manifest import EngineOptions, ModelSource
from deployments.config import GeneratorSettings
from deployments.engines.decoder import DecoderSpec
from deployments.engines.onnx.decoder import OnnxDecoder
from tests.support.decoder_artifacts import write_byte_tokenizer
from tests.support.tiny_encoders import write_json

TOKENS, WINDOW = 96, 32
# The hidden size is a square number. Gemma scales embeddings by the square root of this size. The
# model builder would round a root that is no integer to two decimals.
SIZES = {
    "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "pad_token_id": 0,
    "eos_token_id": 7,
}  # fmt: skip
# Config values of single architectures, in addition to SIZES.
OWN: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": WINDOW},
    "Qwen3ForCausalLM": {"head_dim": 32},
    "GemmaForCausalLM": {"head_dim": 16},
    "Gemma2ForCausalLM": {"head_dim": 16, "sliding_window": WINDOW},
    "Gemma3ForCausalLM": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": [
        "sliding_attention", "full_attention"]},
    "Phi3ForCausalLM": {"original_max_position_embeddings": 128, "sliding_window": WINDOW},
    "PhiForCausalLM": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "Ernie4_5ForCausalLM": {"head_dim": 16},
}  # fmt: skip
BUILT = [
    name for name in SUPPORTED if name != "GPT2LMHeadModel"
]  # tests/integration/parity covers GPT-2


@pytest.mark.slow
@pytest.mark.parametrize("architecture", BUILT)
def test_exported_family_matches_transformers(architecture: str, tmp_path: Path) -> None:
    model = write_model(architecture, tmp_path / "checkpoint")
    spec = export_graph(tmp_path, DECODER_FP32)
    ids = np.random.default_rng(0).integers(8, spec.vocabulary, TOKENS)
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    engine = OnnxDecoder(spec, GeneratorSettings(intra_op_threads=1), slots=2, context=128)
    try:
        read = engine.prefill(1, ids[:-1].tolist(), 0, all_logits=True).copy()
        step = engine.decode(ids[[-1, -1]], np.array([0, TOKENS - 1]))[1]
    finally:
        engine.close()
    tolerance = 1e-4 * expected.std()
    np.testing.assert_allclose(read, expected[:-1], atol=tolerance, rtol=1e-3)
    np.testing.assert_allclose(step, expected[-1], atol=tolerance, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_gpu_graph_with_qk_norms_runs_without_a_gpu(architecture: str, tmp_path: Path) -> None:
    """The gate of a host without a GPU runs the GPU graph on the CPU provider."""
    model = write_model(architecture, tmp_path / "checkpoint")
    spec = export_graph(tmp_path, DECODER_FP16)
    ids = np.random.default_rng(0).integers(8, spec.vocabulary, TOKENS)
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    engine = OnnxDecoder(spec, GeneratorSettings(intra_op_threads=1), slots=2, context=128)
    try:
        read = engine.prefill(1, ids.tolist(), 0, all_logits=True).copy()
    finally:
        engine.close()
    np.testing.assert_allclose(read, expected, atol=0.05 * expected.std(), rtol=0.05)


def test_every_sliding_window_has_known_layers() -> None:
    """A config lists the layers with a sliding window, or transformers applies it to all layers."""
    for architecture in BUILT:
        config_class = getattr(transformers, architecture).config_class
        if hasattr(config_class, "sliding_window"):
            is_uniform = config_class.model_type in WINDOW_IN_ALL_LAYERS
            assert is_uniform != hasattr(config_class, "layer_types"), architecture


def export_graph(directory: Path, recipe: DecoderRecipe) -> DecoderSpec:
    """Export the checkpoint in `directory`. Return the spec of the exported graph."""
    source, graph_dir = directory / "checkpoint", directory / "graph"
    graph_dir.mkdir()
    checkpoint = Checkpoint(source, ModelSource(ref="here", revision="1"), "tiny/model")
    metadata = read_metadata(checkpoint, select_tasks(checkpoint, None, None))
    export_decoder(source, metadata, recipe, graph_dir)
    return DecoderSpec(
        path=graph_dir / GRAPH_NAME,
        device=recipe.device,
        precision=recipe.precision,
        options=EngineOptions(),
        generation_config=metadata.generation_config,
        vocabulary=metadata.output_width,
        max_tokens=metadata.max_tokens,
    )


def write_model(architecture: str, directory: Path) -> Any:
    """Write a tiny model with random weights to `directory`."""
    directory.mkdir()
    tokenizer = write_byte_tokenizer(directory / "tokenizer.json")
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    kind = getattr(transformers, architecture)
    config = SIZES | {"vocab_size": tokenizer.get_vocab_size()} | OWN.get(architecture, {})
    torch.manual_seed(0)
    model = kind(kind.config_class(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    model.save_pretrained(directory)
    return model
