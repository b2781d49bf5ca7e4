"""Prompts in chunks and steps after them: factors by position, and results for each token alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipes import DECODER_FP32
from build_artifacts.types import FloatArray
from deployments.config import GeneratorSettings
from deployments.engines.decoder import DecoderSpec
from deployments.engines.onnx.decoder import OnnxDecoder
from tests.integration.compiler.decoders.test_families import (
    check_export,
    check_logits,
    compute_logits,
    export_graph,
    mean_cosine,
    quantize,
    run_graph,
)
from tests.support.decoder_families import MINISTRAL_ROPE, OWN, WINDOW, write_decoder

MINISTRAL = "Ministral3ForCausalLM"
CHUNKS = (0, 20, 45, 80)  # starts of chunks, and the start of the steps


def read_in_chunks(spec: DecoderSpec, ids: NDArray[np.int64]) -> FloatArray:
    """Return the logits of a prefill in chunks and of steps beside a text of one token."""
    settings = GeneratorSettings(intra_op_threads=2)
    with closing(OnnxDecoder(spec, settings, slots=2, context=128)) as engine:
        found = [
            engine.prefill(1, ids[start:end].tolist(), start, all_logits=True).copy()
            for start, end in pairwise(CHUNKS)
        ]
        for place in range(CHUNKS[-1], len(ids)):
            found.append(engine.decode(ids[[0, place]], np.array([0, place]))[1:].copy())
        return np.concatenate(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        (MINISTRAL, {}),
        ("OlmoForCausalLM", {}),
        ("ApertusForCausalLM", {"intermediate_size": 2000}),  # several threads share the neurons
        ("VaultGemmaForCausalLM", {}),
        ("NanoChatForCausalLM", {}),
        ("PersimmonForCausalLM", {}),
    ],
)
def test_chunks_and_steps_match_transformers(
    architecture: str, changes: Mapping[str, Any], tmp_path: Path
) -> None:
    model = write_decoder(architecture, tmp_path / "checkpoint", OWN[architecture] | changes)
    ids, expected = compute_logits(model)
    spec = export_graph(tmp_path, DECODER_FP32)
    check_logits(read_in_chunks(spec, ids), expected, 1e-4)
    int8 = quantize(spec, tmp_path)
    assert int8.kv_cache_dtype == "int8"
    found = read_in_chunks(int8, ids)
    assert mean_cosine(found, expected) > 0.98
    # A token has the same int8 results in each chunk.
    whole = run_graph(int8, ids)
    np.testing.assert_array_equal(found[: CHUNKS[-1]], whole[: CHUNKS[-1]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": WINDOW},
        {"head_dim": 40},  # the attention leaves RoPE to a node before it
        {"rope_parameters": MINISTRAL_ROPE | {"rope_type": "default"}},
    ],
)
def test_query_factors_match_transformers(changes: Mapping[str, Any], tmp_path: Path) -> None:
    check_export(tmp_path, MINISTRAL, OWN[MINISTRAL] | changes)


@pytest.mark.parametrize("field", ["llama_4_scaling_beta", "original_max_position_embeddings"])
def test_config_without_query_factors_is_refused(field: str, tmp_path: Path) -> None:
    """transformers fails when it computes with such a config."""
    rope = {**MINISTRAL_ROPE, "rope_type": "default"}
    del rope[field]
    own = OWN[MINISTRAL] | {"rope_parameters": rope}
    write_decoder(MINISTRAL, tmp_path / "checkpoint", own)
    with pytest.raises(UnsupportedModel, match=f"`ministral3` lack .*`{field}`"):
        export_graph(tmp_path, DECODER_FP32)
