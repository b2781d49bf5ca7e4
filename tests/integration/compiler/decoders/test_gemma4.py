"""Gemma 4: heads of two sizes, layers that read the keys of others, and inputs of each layer.

Gemma 3n has the latter two.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_artifacts.errors import UnsupportedModel
from build_artifacts.presets import DECODER_FP16
from build_artifacts.recipes import DECODER_FP32
from deployments.config import GeneratorSettings
from deployments.engines.decoder_factory import measure_kv_cache
from deployments.engines.onnx.decoder import OnnxDecoder
from tests.integration.compiler.decoders.test_families import (
    TOKENS,
    check_export,
    check_logits,
    compute_logits,
    export_graph,
    quantize,
)
from tests.support.decoder_families import OWN, write_decoder

ARCHITECTURE = "Gemma4ForCausalLM"
GEMMA4, GEMMA3N = OWN[ARCHITECTURE], OWN["Gemma3nForCausalLM"]
# The form of the largest model: keys that are values too, no inputs of each layer, no shared keys.
LARGE: dict[str, Any] = GEMMA4 | {
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        LARGE,
        GEMMA4 | {"num_kv_shared_layers": 0, "attention_bias": True},
        GEMMA4 | {"final_logit_softcapping": None, "tie_word_embeddings": False},
    ],
    ids=["large", "own keys", "own head"],
)
def test_variant_matches_transformers(own: dict[str, Any], tmp_path: Path) -> None:
    check_export(tmp_path, ARCHITECTURE, own)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "own"),
    [(ARCHITECTURE, GEMMA4), (ARCHITECTURE, LARGE), ("Gemma3nForCausalLM", GEMMA3N)],
    ids=["shared keys", "large", "3n"],
)
def test_slots_of_any_length_match_transformers(
    architecture: str, own: dict[str, Any], tmp_path: Path
) -> None:
    """Prompts in chunks, steps of several slots, and a verification of draft tokens."""
    model = write_decoder(architecture, tmp_path / "checkpoint", own)
    spec = export_graph(tmp_path, DECODER_FP32)
    ids, expected = compute_logits(model)
    engine = OnnxDecoder(spec, GeneratorSettings(intra_op_threads=1), slots=3, context=128)
    lengths = [TOKENS - 1, 50, 3]
    with closing(engine):
        for slot, length in enumerate(lengths):
            half = length // 2
            engine.prefill(slot, ids[:half].tolist(), 0)
            found = engine.prefill(slot, ids[half:length].tolist(), half, all_logits=True)
            check_logits(found.copy(), expected[half:length], 1e-4)
        engine.swap(0, 2, TOKENS)
        engine.copy(2, 0, TOKENS)
        lengths[0] = lengths[2] = TOKENS - 1
        stepped = engine.decode(ids[lengths], np.array(lengths)).copy()
        check_logits(stepped, expected[lengths], 1e-4)
        verified = engine.verify(1, ids[50:54].tolist(), 50).copy()
        check_logits(verified, expected[50:54], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "own", "kv_cache_dtype"),
    [
        (ARCHITECTURE, GEMMA4, None),
        (ARCHITECTURE, LARGE, "int8"),
        ("Gemma3nForCausalLM", GEMMA3N, None),
    ],
    ids=["shared keys", "large", "3n"],
)
def test_int8_graph_stays_close(
    architecture: str, own: dict[str, Any], kv_cache_dtype: str | None, tmp_path: Path
) -> None:
    model = write_decoder(architecture, tmp_path / "checkpoint", own)
    spec = quantize(export_graph(tmp_path, DECODER_FP32), tmp_path)
    assert spec.kv_cache_dtype == kv_cache_dtype
    ids, expected = compute_logits(model)
    engine = OnnxDecoder(spec, GeneratorSettings(intra_op_threads=1), slots=2, context=128)
    with closing(engine):
        found = engine.prefill(1, ids.tolist(), 0, all_logits=True).copy()
        assert measure_kv_cache(spec, GeneratorSettings(kv_slots=2, max_context_tokens=128)) == sum(
            array.nbytes for array in engine.kv_cache.arrays
        )
    products = (found * expected).sum(axis=1)
    cosines = products / (np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1))
    assert cosines.mean() > 0.95


@pytest.mark.parametrize("architecture", [ARCHITECTURE, "Gemma3nForCausalLM"])
def test_graph_for_gpus_is_refused(architecture: str, tmp_path: Path) -> None:
    write_decoder(architecture, tmp_path / "checkpoint", OWN[architecture])
    with pytest.raises(UnsupportedModel, match="`gpu-fp16`: "):
        export_graph(tmp_path, DECODER_FP16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
             "moe_intermediate_size": 32},
            "mixtures of experts",
        ),
        ({"use_bidirectional_attention": "all"}, "bidirectional attention"),
    ],
)  # fmt: skip
def test_unsupported_form_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_decoder(ARCHITECTURE, tmp_path / "checkpoint", GEMMA4 | changes)
    with pytest.raises(UnsupportedModel, match=message):
        export_graph(tmp_path, DECODER_FP32)
