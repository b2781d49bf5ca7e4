"""Decoders with latent attention, such as DeepSeek-V2."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_artifacts.errors import UnsupportedModel
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.presets import DECODER_FP16, DECODER_INT8
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import DECODER_FP32, BuildRecipe
from deployments.artifacts.manifest import Gate
from tests.integration.compiler.decoders.test_chunked_prompts import CHUNKS, read_in_chunks
from tests.integration.compiler.decoders.test_families import (
    check_export,
    check_logits,
    compute_logits,
    export_graph,
    mean_cosine,
    quantize,
    run_graph,
)
from tests.support.decoder_families import OWN, WINDOW, write_decoder

V2, V3, MINICPM, YOUTU = (
    f"{name}ForCausalLM" for name in ("DeepseekV2", "DeepseekV3", "MiniCPM3", "Youtu")
)
ARCHITECTURES = (V2, V3, MINICPM, YOUTU, "Glm4MoeLiteForCausalLM")
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.7,
    "original_max_position_embeddings": WINDOW,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        (V2, {"q_lora_rank": 24, "attention_bias": True}),
        (V2, {"rope_parameters": YARN}),
        (V2, {"v_head_dim": 48}),  # as large as keys
        (V3, {"rope_interleave": False, "q_lora_rank": None}),
        (V3, {"rope_parameters": YARN}),
        (MINICPM, {"q_lora_rank": None, "tie_word_embeddings": False}),
        (YOUTU, {"rope_interleave": True}),
    ],
)
def test_variant_matches_transformers(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    check_export(tmp_path, architecture, OWN[architecture] | changes)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [V2, MINICPM])
def test_chunks_and_steps_match_transformers(architecture: str, tmp_path: Path) -> None:
    model = write_decoder(architecture, tmp_path / "checkpoint", OWN[architecture])
    ids, expected = compute_logits(model)
    spec = export_graph(tmp_path, DECODER_FP32)
    check_logits(read_in_chunks(spec, ids), expected, 1e-4)
    int8 = quantize(spec, tmp_path)
    assert int8.kv_cache_dtype is None
    found = read_in_chunks(int8, ids)
    assert mean_cosine(found, expected) > 0.97
    if architecture == MINICPM:  # sums over experts depend on the threads
        whole = run_graph(int8, ids)
        np.testing.assert_array_equal(found[: CHUNKS[-1]], whole[: CHUNKS[-1]])


@pytest.mark.slow
def test_build_says_that_the_kv_cache_stays_float(tmp_path: Path) -> None:
    write_decoder(MINICPM, tmp_path / "checkpoint", OWN[MINICPM])
    gate = Gate(next_token_agreement=0.3, perplexity_increase=1)
    request = BuildRequest(
        ref=str(tmp_path / "checkpoint"),
        store=tmp_path / "store",
        recipe=BuildRecipe(candidates=(), decoders=(DECODER_INT8,), gate=gate),
        budget=BuildBudget(tune_seconds=0),
    )
    log = io.StringIO()
    (candidate,) = build(request, BuildProgress(log)).manifest.candidates
    assert candidate.kv_cache_dtype is None
    assert "MB, its KV cache stays float" in log.getvalue()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_graphs_for_gpus_are_refused(architecture: str, tmp_path: Path) -> None:
    write_decoder(architecture, tmp_path / "checkpoint", OWN[architecture])
    with pytest.raises(UnsupportedModel, match="`gpu-fp16`: "):
        export_graph(tmp_path, DECODER_FP16)


@pytest.mark.parametrize(
    ("architecture", "changes", "field"),
    [
        (V2, {"topk_method": "group_limited_greedy", "n_group": 2}, "topk_method"),
        (V3, {"n_group": 2}, "n_group"),
        (V3, {"norm_topk_prob": False}, "norm_topk_prob"),
    ],
)
def test_unsupported_selection_of_experts_is_refused(
    architecture: str, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    write_decoder(architecture, tmp_path / "checkpoint", OWN[architecture] | changes)
    with pytest.raises(UnsupportedModel, match=f"`{field}` of the architecture"):
        export_graph(tmp_path, DECODER_FP32)
