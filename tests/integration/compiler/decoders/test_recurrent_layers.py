"""Decoders with recurrent layers: states in slots, and builds."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from build_artifacts.errors import UnsupportedModel
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.presets import (
    DECODER_BF16_TORCH,
    DECODER_FP16,
)
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import DECODER_FP32, BuildRecipe, DecoderRecipe
from deployments.artifacts.manifest import ArtifactManifest
from deployments.config import GeneratorSettings
from deployments.engines.decoder import PAST_STATES, DecoderSpec
from deployments.engines.decoder_factory import measure_kv_cache, open_decoder
from deployments.engines.onnx.decoder import OnnxDecoder
from deployments.errors import EngineFailed
from tests.integration.compiler.decoders.test_families import (
    check_export,
    export_graph,
    quantize,
)
from tests.support.decoder_families import MAMBA2, NEMOTRON_EXPERTS, OWN, write_decoder
from tests.support.recurrent_slots import (
    FIRST,
    LAST_CHUNK,
    OTHER,
    PROMPT,
    RANDOM,
    answer,
    check_slots_move,
    read_prompt,
    step,
)

pytestmark = pytest.mark.slow

FAMILIES: dict[str, dict[str, Any]] = {
    "Lfm2ForCausalLM": OWN["Lfm2ForCausalLM"],
    "Qwen3_5ForCausalLM": OWN["Qwen3_5ForCausalLM"],
    "Qwen3NextForCausalLM": OWN["Qwen3NextForCausalLM"] | {"mlp_only_layers": [0, 1, 2]},
    "GraniteMoeHybridForCausalLM": OWN["GraniteMoeHybridForCausalLM"] | MAMBA2,
    "FalconH1ForCausalLM": OWN["FalconH1ForCausalLM"],
    "BambaForCausalLM": OWN["BambaForCausalLM"],
    "NemotronHForCausalLM": OWN["NemotronHForCausalLM"],
    "Lfm3ForCausalLM": OWN["Lfm3ForCausalLM"],
    "OlmoHybridForCausalLM": OWN["OlmoHybridForCausalLM"],
    "Mamba2ForCausalLM": OWN["Mamba2ForCausalLM"],
}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("GraniteMoeHybridForCausalLM", MAMBA2),
        (
            "GraniteMoeHybridForCausalLM",
            MAMBA2
            | {
                "num_local_experts": 8,
                "mamba_n_groups": 2,
                "position_embedding_type": None,
                "mamba_proj_bias": True,
            },
        ),
        ("GraniteMoeHybridForCausalLM", MAMBA2 | {"hidden_act": "gelu"}),
        ("Qwen3_5ForCausalLM", {"hidden_act": "gelu"}),
        ("Lfm2MoeForCausalLM", {"use_expert_bias": False}),
        ("Lfm2ForCausalLM", {"conv_bias": False, "conv_L_cache": 4}),
        ("Qwen3_5ForCausalLM", {"linear_num_key_heads": 4, "tie_word_embeddings": True}),
        ("Qwen3NextForCausalLM", {"linear_num_key_heads": 4, "attention_bias": True}),
        ("Qwen3NextForCausalLM", {"norm_topk_prob": False, "decoder_sparse_step": 2}),
        (
            "FalconH1ForCausalLM",
            {
                "attention_bias": True,
                "mlp_bias": True,
                "projectors_bias": True,
                "mamba_proj_bias": True,
                "mamba_conv_bias": False,
            },
        ),
        (
            "FalconH1ForCausalLM",
            {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2},
        ),
        ("FalconH1ForCausalLM", {"mamba_rms_norm": True, "mamba_n_groups": 2}),
        (
            "BambaForCausalLM",
            {
                "mamba_n_groups": 2,
                "mamba_proj_bias": True,
                "mamba_conv_bias": False,
                "attention_bias": True,
                "mlp_bias": True,
            },
        ),
        ("BambaForCausalLM", {"hidden_act": "gelu", "tie_word_embeddings": True}),
        (
            "NemotronHForCausalLM",
            {"time_step_min": 0.7, "use_bias": True, "mlp_bias": True, "use_conv_bias": False},
        ),
        ("NemotronHForCausalLM", {"n_groups": 1, "mlp_hidden_act": "gelu"}),
        ("NemotronHForCausalLM", NEMOTRON_EXPERTS),
        ("NemotronHForCausalLM", NEMOTRON_EXPERTS | {"mlp_bias": True}),
        (
            "Mamba2ForCausalLM",
            {
                "n_groups": 1,
                "tie_word_embeddings": True,
                "use_bias": True,
                "use_conv_bias": False,
            },
        ),
        ("Lfm3ForCausalLM", {"use_attention_gate": False, "attention_bias": True}),
        ("Lfm3ForCausalLM", {"use_sandwich_norm": False, "conv_bias": True}),
        ("OlmoHybridForCausalLM", {"linear_allow_neg_eigval": False, "attention_bias": True}),
        (
            "OlmoHybridForCausalLM",
            {"rope_parameters": {"rope_theta": 1e4}, "linear_num_key_heads": 2},
        ),
        # An epsilon that differs from that of the norm in DeltaNet.
        ("OlmoHybridForCausalLM", {"rms_norm_eps": 1e-2}),
    ],
)
def test_variant_matches_transformers(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    check_export(tmp_path, architecture, OWN[architecture] | changes)


@pytest.fixture(scope="module", params=list(FAMILIES))
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderSpec:
    """An int8 graph with an int8 KV cache, if it has attention."""
    directory = tmp_path_factory.mktemp("recurrent")
    write_decoder(request.param, directory / "checkpoint", FAMILIES[request.param])
    quantized = quantize(export_graph(directory, DECODER_FP32), directory)
    assert quantized.kv_cache_dtype == (None if request.param == "Mamba2ForCausalLM" else "int8")
    return quantized


@pytest.fixture
def engine(spec: DecoderSpec) -> Iterator[OnnxDecoder]:
    decoder = OnnxDecoder(spec, GeneratorSettings(), slots=3, context=128)
    with closing(decoder):
        yield decoder


def test_logits_are_batch_and_chunk_invariant(engine: OnnxDecoder) -> None:
    assert engine.info.is_recurrent
    assert engine.info.max_draft_tokens == 0
    whole = engine.prefill(0, PROMPT, 0).copy()
    alone = answer(engine, 0)
    engine.prefill(0, OTHER, 0)
    np.testing.assert_array_equal(read_prompt(engine, 2), whole)
    np.testing.assert_array_equal(answer(engine, 2), alone)


@pytest.mark.parametrize(
    ("architecture", "wide"),
    [
        (
            "GraniteMoeHybridForCausalLM",
            {"hidden_size": 1536, "mamba_n_heads": 48, "mamba_d_state": 128},
        ),
        (
            "NemotronHForCausalLM",
            {"hidden_size": 1536, "mamba_num_heads": 48, "mamba_head_dim": 80, "n_groups": 8},
        ),
    ],
)
def test_wide_gates_are_chunk_invariant_with_several_threads(
    architecture: str, wide: dict[str, Any], tmp_path: Path
) -> None:
    """ONNX Runtime would split a gate of 48 columns, and its softplus, by the number of tokens."""
    write_decoder(architecture, tmp_path / "checkpoint", FAMILIES[architecture] | wide)
    spec = quantize(export_graph(tmp_path, DECODER_FP32), tmp_path)
    prompts = [RANDOM.integers(8, 250, tokens).tolist() for tokens in range(40, 120, 8)]
    settings = GeneratorSettings(intra_op_threads=2)
    with closing(OnnxDecoder(spec, settings, slots=2, context=128)) as decoder:
        for prompt in prompts:
            whole = decoder.prefill(0, prompt, 0).copy()
            decoder.prefill(1, prompt[:-16], 0)
            chunk = decoder.prefill(1, prompt[-16:], len(prompt) - 16)
            np.testing.assert_array_equal(chunk, whole)
            lengths = np.full(2, len(prompt))
            alone = decoder.decode(np.array([9]), lengths[:1]).copy()
            decoder.prefill(0, prompt, 0)
            both = decoder.decode(np.array([9, 9]), lengths)
            np.testing.assert_array_equal(both, [alone[0], alone[0]])


def test_prompt_continues_at_its_last_chunk(engine: OnnxDecoder) -> None:
    expected = read_prompt(engine, 0)
    expected_answer = answer(engine, 0)
    again = engine.prefill(0, PROMPT[LAST_CHUNK:], LAST_CHUNK).copy()
    np.testing.assert_array_equal(again, expected)
    np.testing.assert_array_equal(answer(engine, 0), expected_answer)
    with pytest.raises(EngineFailed, match="has states after 64 and 44 tokens, not after 24"):
        engine.prefill(0, PROMPT[FIRST:], FIRST)


def test_states_move_with_their_slot(engine: OnnxDecoder) -> None:
    check_slots_move(engine, np.testing.assert_array_equal)


def test_memory_of_states_is_counted(spec: DecoderSpec, engine: OnnxDecoder) -> None:
    shapes = [i.shape[1:] for i in engine.session.get_inputs() if i.name.startswith(PAST_STATES)]
    assert len(shapes) > 1
    values = spec.generation_config.state_values
    assert values == sum(map(np.prod, shapes))
    assert bool(engine.kv_cache.arrays) == bool(spec.generation_config.layers)
    settings = GeneratorSettings(kv_slots=3, max_context_tokens=128)
    keys_and_values = sum(array.nbytes for array in engine.kv_cache.arrays)
    assert measure_kv_cache(spec, settings) == keys_and_values + 3 * values * 2 * 4


@pytest.mark.parametrize("recipe", [DECODER_FP16, DECODER_BF16_TORCH])
def test_graphs_and_programs_for_gpus_are_refused(recipe: DecoderRecipe, tmp_path: Path) -> None:
    write_decoder("Lfm2ForCausalLM", tmp_path / "checkpoint", OWN["Lfm2ForCausalLM"])
    with pytest.raises(UnsupportedModel, match=f"`{recipe.name}`: "):
        export_graph(tmp_path, recipe)


def test_host_without_a_gpu_builds_no_candidate_for_it(tmp_path: Path) -> None:
    """Its gate on the CPU takes minutes for a model of usual size."""
    write_decoder("Lfm2ForCausalLM", tmp_path / "checkpoint", OWN["Lfm2ForCausalLM"])
    recipe = BuildRecipe(candidates=(), decoders=(DECODER_FP32, DECODER_BF16_TORCH))
    request = BuildRequest(
        ref=str(tmp_path / "checkpoint"),
        store=tmp_path / "store",
        recipe=recipe,
        budget=BuildBudget(tune_seconds=0),
    )
    built = build(request, BuildProgress(io.StringIO()))
    assert [candidate.name for candidate in built.manifest.candidates] == ["cpu-fp32"]


@pytest.mark.parametrize(
    ("architecture", "on_gpu"),
    [("Lfm2ForCausalLM", [("gpu-bf16-transformers", "transformers")]), ("Mamba2ForCausalLM", [])],
)
def test_build_seals_a_graph_that_answers_as_transformers(
    architecture: str,
    on_gpu: list[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("build_artifacts.families.decoder.has_device", lambda _: True)
    checkpoint = tmp_path / "checkpoint"
    model = write_decoder(architecture, checkpoint, OWN[architecture])
    recipe = BuildRecipe(candidates=(), decoders=(DECODER_FP32, DECODER_BF16_TORCH))
    budget = BuildBudget(tune_seconds=0.3)
    request = BuildRequest(
        ref=str(checkpoint), store=tmp_path / "store", recipe=recipe, budget=budget
    )
    built = build(request, BuildProgress(io.StringIO()))
    manifest = ArtifactManifest.read(built.directory)
    candidate, *others = manifest.candidates
    assert candidate.name == "cpu-fp32"
    assert [(each.name, each.engine) for each in others] == on_gpu
    ids = torch.tensor([PROMPT])
    generated = model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    expected = generated[0, len(PROMPT) :].tolist()
    spec = DecoderSpec.of(built.directory, manifest, candidate)
    with closing(open_decoder(spec, GeneratorSettings(kv_slots=2))) as engine:
        tokens = [int(engine.prefill(1, PROMPT, 0).argmax())]
        while len(tokens) < len(expected):
            position = len(PROMPT) + len(tokens) - 1
            tokens.append(int(step(engine, 1, tokens[-1], position).argmax()))
    assert tokens == expected
