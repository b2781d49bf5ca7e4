"""Comparison of every supported decoder architecture with transformers.

Texts are longer than sliding windows, so that a graph without the window differs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from numpy.linalg import norm
from numpy.typing import NDArray

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.decoders import SUPPORTED
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.decoders.calibration import CalibrationTexts
from build_artifacts.decoders.export import export_decoder
from build_artifacts.decoders.graphs.export import SCALED_ROPE
from build_artifacts.decoders.int8_kv_cache import has_int8_kv_cache, quantize_kv_cache
from build_artifacts.decoders.logits_slicing import GRAPH_NAME
from build_artifacts.decoders.per_token_int8 import quantize_per_token
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families import read_metadata
from build_artifacts.presets import DECODER_FP16
from build_artifacts.recipes import DECODER_FP32, DecoderRecipe
from build_artifacts.types import FloatArray
from deployments.artifacts.manifest import EngineOptions, ModelSource
from deployments.artifacts.types import KvCacheDtype
from deployments.config import GeneratorSettings
from deployments.engines.decoder import DecoderSpec
from deployments.engines.layer_types import WINDOW_IN_ALL_LAYERS, read_windows
from deployments.engines.onnx.decoder import OnnxDecoder
from tests.support.decoder_families import (
    FALCON_40B,
    FALCON_RW,
    OWN,
    SIZES,
    WINDOW,
    write_decoder,
)

IntArray = NDArray[np.int64]

TOKENS = 96
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
    "original_max_position_embeddings": WINDOW,
}  # fmt: skip
BUILT = [
    name for name in SUPPORTED if name != "GPT2LMHeadModel"
]  # tests/integration/parity covers GPT-2


# Classes whose `sliding_window` the graphs do not have. Builds refuse other values than None.
WITHOUT_WINDOW = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "NemotronHForCausalLM")


@pytest.mark.parametrize("architecture", BUILT)
def test_windows_of_a_family_are_tested(architecture: str) -> None:
    config_class = getattr(transformers, architecture).config_class
    windows = read_windows(config_class(**SIZES | OWN[architecture]))
    has_window = hasattr(config_class, "sliding_window") and architecture not in WITHOUT_WINDOW
    assert any(windows) or not has_window


@pytest.mark.slow
@pytest.mark.parametrize("architecture", BUILT)
def test_exported_family_matches_transformers(architecture: str, tmp_path: Path) -> None:
    check_export(tmp_path, architecture, OWN[architecture])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        # Norms after the sums and embeddings of another size, as in opt-350m.
        ("OPTForCausalLM", {"do_layer_norm_before": False, "word_embed_proj_dim": 128}),
        ("OPTForCausalLM", {"_remove_final_layer_norm": True, "enable_bias": False}),
        ("GPTNeoForCausalLM", {"attention_types": [[["local"], 2]], "tie_word_embeddings": False}),
        # RoPE of 24 channels, which the attention leaves to a node before it.
        ("GPTJForCausalLM", {"rotary_dim": 24, "n_inner": 96}),
        (
            "BloomForCausalLM",
            {"num_attention_heads": 12, "hidden_size": 192, "tie_word_embeddings": False},
        ),
        # As in falcon-40b, in falcon-11b, and in falcon-rw-1b.
        ("FalconForCausalLM", FALCON_40B),
        ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("FalconForCausalLM", FALCON_RW),
        ("FalconForCausalLM", {"alibi": True, "multi_query": True}),
        (
            "FalconForCausalLM",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        ),
        (
            "GPTBigCodeForCausalLM",
            {"multi_query": False, "scale_attn_weights": False, "hidden_size": 64},
        ),
        ("MptForCausalLM", {"num_attention_heads": 12, "hidden_size": 192}),
        ("MptForCausalLM", {"attn_config": {"softmax_scale": 0.3}, "tie_word_embeddings": False}),
        ("CodeGenForCausalLM", {"num_attention_heads": 8, "n_inner": 96}),
        # The table of positions has a row of zeros for the padding token.
        ("XGLMForCausalLM", {"pad_token_id": 9, "scale_embedding": False}),
        ("BioGptForCausalLM", {"scale_embedding": False, "hidden_act": "relu"}),
        ("GPTNeoXForCausalLM", {"use_parallel_residual": False}),
        # RoPE of 20 of 80 channels, as in pythia-2.8b.
        ("GPTNeoXForCausalLM", {"hidden_size": 320, "rotary_pct": 0.25}),
        ("HeliumForCausalLM", {"hidden_size": 160, "head_dim": 40}),
        ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
        ("SmolLM3ForCausalLM", {"tie_word_embeddings": False, "attention_bias": True}),
        ("GraniteMoeHybridForCausalLM", {"num_local_experts": 8}),
        ("OlmoForCausalLM", {"clip_qkv": None, "attention_bias": True}),
        # The attention leaves RoPE of such heads to a node before it.
        ("OlmoForCausalLM", {"hidden_size": 160}),
        ("ApertusForCausalLM", {"hidden_act": "relu2", "attention_bias": True}),
        (
            "VaultGemmaForCausalLM",
            {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        ),
        ("NanoChatForCausalLM", {"final_logit_softcapping": None, "attention_bias": True}),
        ("NanoChatForCausalLM", {"rope_parameters": YARN}),
        ("HyperCLOVAXForCausalLM", {"use_post_norm": False, "attention_multiplier": None}),
        (
            "GraniteSWAForCausalLM",
            {"layer_rope_theta": None, "attention_bias": True, "mlp_bias": True},
        ),
        ("GraniteMoeSWAForCausalLM", {"shared_intermediate_size": 0}),
        ("PersimmonForCausalLM", {"qk_layernorm": False}),
        ("Jais2ForCausalLM", {"attention_bias": False, "mlp_bias": False}),
    ],
)
def test_exported_variant_matches_transformers(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    check_export(tmp_path, architecture, OWN[architecture] | changes)


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("CohereForCausalLM", "use_qk_norm", True),
        ("StableLmForCausalLM", "qk_layernorm", True),
        ("StableLmForCausalLM", "use_parallel_residual", True),
        ("OPTForCausalLM", "layer_norm_elementwise_affine", False),
        ("BloomForCausalLM", "apply_residual_connection_post_layernorm", True),
        ("MptForCausalLM", "no_bias", False),
        ("MptForCausalLM", "attn_config.clip_qkv", 6.0),
        ("MptForCausalLM", "attn_config.alibi", False),
        ("MptForCausalLM", "attn_config.alibi_bias_max", 16),
        ("MptForCausalLM", "attn_config.prefix_lm", True),
        ("XGLMForCausalLM", "add_cross_attention", True),
        ("BambaForCausalLM", "time_step_limit", (0.0, 1.0)),
    ],
)
def test_unsupported_variant_is_rejected_by_name(
    architecture: str, field: str, value: object, tmp_path: Path
) -> None:
    outer, _, inner = field.rpartition(".")
    changes = {outer: {inner: value}} if outer else {field: value}
    write_decoder(architecture, tmp_path / "checkpoint", OWN[architecture] | changes)
    with pytest.raises(UnsupportedModel, match=f"`{field}` of the architecture"):
        export_graph(tmp_path, DECODER_FP32)


@pytest.mark.parametrize(
    ("architecture", "layers", "message"),
    [
        ("Qwen3ForCausalLM", ["full_attention", "linear_attention"], "has layers of the type"),
        ("GraniteMoeHybridForCausalLM", ["mamba", "mamba"], "has no layer with attention"),
    ],
)
def test_unsupported_layers_are_rejected(
    architecture: str, layers: list[str], message: str, tmp_path: Path
) -> None:
    write_decoder(
        architecture, tmp_path / "checkpoint", OWN[architecture] | {"layer_types": layers}
    )
    with pytest.raises(UnsupportedModel, match=message):
        export_graph(tmp_path, DECODER_FP32)


@pytest.mark.slow
@pytest.mark.parametrize("rope_type", SCALED_ROPE)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_scaled_rope_matches_transformers(
    architecture: str, rope_type: str, tmp_path: Path
) -> None:
    scaled = {"original_max_position_embeddings": WINDOW} if rope_type == "yarn" else {}
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, **scaled}
    own = OWN[architecture]
    check_export(tmp_path, architecture, own | {"rope_parameters": rope})


@pytest.mark.slow
def test_alibi_is_rounded_in_long_texts(tmp_path: Path) -> None:
    """Falcon rounds positions to bf16, which does not represent all numbers above 256."""
    own = FALCON_RW | {"max_position_embeddings": 512}
    model = write_decoder("FalconForCausalLM", tmp_path / "checkpoint", own)
    ids, expected = compute_logits(model, 400)
    found = run_graph(export_graph(tmp_path, DECODER_FP32), ids, context=448)
    check_logits(found, expected, 1e-4)


def check_export(directory: Path, architecture: str, own: dict[str, Any]) -> None:
    """Check the logits of an exported tiny model with the config values `own`."""
    model = write_decoder(architecture, directory / "checkpoint", own)
    spec = export_graph(directory, DECODER_FP32)
    ids, expected = compute_logits(model)
    check_logits(run_graph(spec, ids), expected, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes", "pairs"),
    [
        ("Cohere2ForCausalLM", {}, [(0, 1), (62, 63)]),
        ("GPTNeoXForCausalLM", {}, [(0, 16), (15, 31)]),
        ("OPTForCausalLM", {}, []),
        ("GPTNeoForCausalLM", {}, []),
        ("GPTJForCausalLM", {}, [(0, 1), (30, 31)]),
        ("FalconForCausalLM", {}, [(0, 32), (31, 63)]),
        ("GPTBigCodeForCausalLM", {}, []),
        # The attention leaves this RoPE to a node before it.
        ("GPTNeoXForCausalLM", {"hidden_size": 320, "rotary_pct": 0.25}, [(0, 10), (9, 19)]),
    ],
)
def test_int8_kv_cache_stays_close(
    architecture: str, changes: dict[str, Any], pairs: list[tuple[int, int]], tmp_path: Path
) -> None:
    """The channels of a pair share a scale, because RoPE moves values between them."""
    model = write_decoder(architecture, tmp_path / "checkpoint", OWN[architecture] | changes)
    spec = quantize(export_graph(tmp_path, DECODER_FP32), tmp_path)
    assert spec.kv_cache_dtype == "int8"
    check_cosines(spec, model)
    tables = onnx.load(spec.path).graph.initializer
    (scales,) = (onnx.numpy_helper.to_array(t) for t in tables if t.name == "kv_cache/0/key_scales")
    for first, second in pairs:
        np.testing.assert_array_equal(scales[..., first], scales[..., second])
    assert len(np.unique(scales)) >= scales.size / 2


def check_cosines(spec: DecoderSpec, model: Any) -> None:
    """Check that the logits of a quantized graph are close to those of the model."""
    ids, expected = compute_logits(model)
    assert mean_cosine(run_graph(spec, ids), expected) > 0.99


def mean_cosine(found: FloatArray, expected: FloatArray) -> float:
    norms = norm(found, axis=1) * norm(expected, axis=1)
    return float(((found * expected).sum(axis=1) / norms).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("BloomForCausalLM", {}), ("FalconForCausalLM", {"alibi": True}), ("MptForCausalLM", {})],
)
def test_kv_cache_with_alibi_stays_float(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = write_decoder(architecture, tmp_path / "checkpoint", OWN[architecture] | changes)
    spec = quantize(export_graph(tmp_path, DECODER_FP32), tmp_path)
    assert spec.kv_cache_dtype is None
    check_cosines(spec, model)


@pytest.mark.slow
def test_kv_cache_of_norms_after_rope_stays_float(tmp_path: Path) -> None:
    """The norm of HunYuan's keys has a scale per channel, so a pair does not keep its norm."""
    architecture = "HunYuanDenseV1ForCausalLM"
    write_decoder(architecture, tmp_path / "checkpoint", OWN[architecture])
    assert quantize(export_graph(tmp_path, DECODER_FP32), tmp_path).kv_cache_dtype is None


def quantize(spec: DecoderSpec, directory: Path) -> DecoderSpec:
    """Quantize the weights of a graph, and its KV cache if the graph is supported."""
    random = np.random.default_rng(1)
    texts = [random.integers(8, spec.vocabulary, TOKENS).tolist() for _ in range(4)]
    calibration = CalibrationTexts(texts, spec.generation_config)
    into = directory / "int8" / GRAPH_NAME
    into.parent.mkdir()
    quantize_per_token(spec.path, into, calibration)
    quantize_kv_cache(into, calibration)
    dtype: KvCacheDtype | None = "int8" if has_int8_kv_cache(into) else None
    return replace(spec, path=into, precision="int8", kv_cache_dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_gpu_graph_with_qk_norms_runs_without_a_gpu(architecture: str, tmp_path: Path) -> None:
    """The gate of a host without a GPU runs the GPU graph on the CPU provider."""
    model = write_decoder(architecture, tmp_path / "checkpoint", OWN[architecture])
    spec = export_graph(tmp_path, DECODER_FP16)
    ids, expected = compute_logits(model)
    check_logits(run_graph(spec, ids), expected, 0.05)


def test_every_sliding_window_has_known_layers() -> None:
    """A config lists the layers with a sliding window, or transformers applies it to all layers."""
    for architecture in BUILT:
        config_class = getattr(transformers, architecture).config_class
        if hasattr(config_class, "sliding_window"):
            is_uniform = config_class.model_type in WINDOW_IN_ALL_LAYERS
            lists_layers = hasattr(config_class, "layer_types")
            lists_layers |= "layer_types" in config_class.attribute_map
            assert is_uniform != lists_layers, architecture


def compute_logits(model: Any, tokens: int = TOKENS) -> tuple[IntArray, FloatArray]:
    """Return random token ids, and their logits by transformers, [tokens, vocabulary]."""
    ids = np.random.default_rng(0).integers(8, model.config.vocab_size, tokens)
    with torch.inference_mode():
        return ids, model(torch.from_numpy(ids)[None]).logits[0].numpy()


def run_graph(spec: DecoderSpec, ids: IntArray, context: int = 128) -> FloatArray:
    """Return the logits of a prefill of all tokens but one, and of a decode step."""
    engine = OnnxDecoder(spec, GeneratorSettings(intra_op_threads=1), slots=2, context=context)
    try:
        read = engine.prefill(1, ids[:-1].tolist(), 0, all_logits=True).copy()
        step = engine.decode(ids[[-1, -1]], np.array([0, len(ids) - 1]))[1:]
        return np.concatenate([read, step])
    finally:
        engine.close()


def check_logits(found: FloatArray, expected: FloatArray, tolerance: float) -> None:
    np.testing.assert_allclose(found, expected, atol=tolerance * expected.std(), rtol=tolerance)


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
