"""Traced torch programs of decoders, rejected checkpoints, and a build with GPU candidates."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from build_artifacts import accuracy_gate
from build_artifacts.decoders import candidates as decoder_candidates
from build_artifacts.decoders.generation_report import read_generation_report
from build_artifacts.decoders.torch_export import export_program
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families import decoder as decoder_family
from build_artifacts.pipeline import BuildResult, build
from build_artifacts.presets import DECODER_FP16, DECODER_FP16_TORCH, DECODER_INT8
from build_artifacts.progress import BuildProgress
from deployments.artifacts.generation_config import EncoderDecoderConfig
from deployments.artifacts.manifest import ArtifactManifest, EngineOptions
from deployments.artifacts.types import Attention, Device
from deployments.config import GeneratorSettings
from deployments.engines.decoder import DecoderEngine, DecoderSpec
from deployments.engines.decoder_factory import open_decoder
from deployments.engines.pytorch.decoder import TorchDecoder
from tests.integration.compiler.decoders.test_build import LENIENT, request_of
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.decoder_programs import PROGRAM, program_spec
from tests.support.tiny_decoders import tiny_gpt2, tiny_llama

PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("source") / "llama")


def logits_of(checkpoint: Path) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        logits: np.ndarray = model(torch.tensor([PROMPT])).logits[0].numpy()
    return logits


def check(spec: DecoderSpec, expected: np.ndarray) -> None:
    """Check the logits of two prefill chunks and two decode steps while another slot runs."""
    decoder = TorchDecoder(spec, GeneratorSettings(), slots=2, context=128)
    try:
        decoder.prefill(0, PROMPT[::-1], 0)
        read = [decoder.prefill(1, PROMPT[:17], 0, all_logits=True).copy()]
        read.append(decoder.prefill(1, PROMPT[17:-2], 17, all_logits=True).copy())
        for place in (len(PROMPT) - 2, len(PROMPT) - 1):
            step = np.array([3, PROMPT[place]]), np.array([40, place])
            read.append(decoder.decode(*step)[1:].copy())
        np.testing.assert_allclose(np.concatenate(read), expected, atol=1e-4)
    finally:
        decoder.close()


def check_step(decoder: DecoderEngine) -> None:
    """Check that a decode step of two slots gives the logits of a prefill of the same tokens."""
    expected = decoder.prefill(1, [5, 6, 7], 0).copy()
    decoder.prefill(0, [5, 6], 0)
    result = decoder.decode(np.array([7, 7]), np.array([2, 2]))
    np.testing.assert_allclose(result[0], expected, atol=0.2)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_program_matches_transformers(llama: Path, attention: Attention, tmp_path: Path) -> None:
    check(
        program_spec(llama, tmp_path, replace(PROGRAM, run=EngineOptions(attention=attention))),
        logits_of(llama),
    )


def test_program_supports_other_family(tmp_path: Path) -> None:
    source = tiny_gpt2(tmp_path / "gpt2")
    spec = program_spec(source, tmp_path)
    check(spec, logits_of(source))
    # The tied embedding must be stored once.
    assert spec.path.stat().st_size < 1.2 * (source / "model.safetensors").stat().st_size


def test_export_program_rejects_recipe_before_loading(llama: Path, tmp_path: Path) -> None:
    metadata, path = read_checkpoint_metadata(llama), tmp_path / "p"
    source = EncoderDecoderConfig(max_source_tokens=64, decoder_start_token_id=0)
    behind_encoder = metadata.required_generation_config.model_copy(
        update={"encoder_decoder": source}
    )
    with pytest.raises(UnsupportedModel, match="with an encoder"):
        export_program(tmp_path, replace(metadata, generation_config=behind_encoder), PROGRAM, path)
    for recipe in (
        replace(PROGRAM, precision="int4"),
        replace(PROGRAM, options=("block_size=16",)),
        replace(PROGRAM, per_token_int8=True),
    ):
        with pytest.raises(UnsupportedModel, match="torch does not support"):
            export_program(tmp_path, metadata, recipe, path)
    for run in (EngineOptions(tensor_parallel_size=2), EngineOptions(kv_offload=True)):
        with pytest.raises(UnsupportedModel, match="programs support no `tensor_parallel_size`"):
            export_program(tmp_path, metadata, replace(PROGRAM, run=run), path)
    assert not path.exists()


def test_tracing_failure_names_architecture(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers.models.llama import modeling_llama

    def spectral(hidden: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(hidden).real

    monkeypatch.setattr(
        modeling_llama.LlamaRMSNorm, "forward", lambda self, hidden: spectral(hidden)
    )
    with pytest.raises(UnsupportedModel, match=r"`LlamaForCausalLM` cannot .* `aten\.\w*fft"):
        export_program(llama, read_checkpoint_metadata(llama), PROGRAM, tmp_path / "p")


@pytest.fixture(scope="module")
def built(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """A build on a simulated machine with a GPU. The CPU runs the graphs."""
    store = tmp_path_factory.mktemp("store")
    recipes = (DECODER_INT8, DECODER_FP16, DECODER_FP16_TORCH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy_gate, "has_device", lambda device: True)
        patch.setattr(decoder_family, "has_device", lambda device: True)
        # With more threads than free cores, torch is slow, because its threads wait for each other.
        patch.setattr(decoder_candidates, "usable_cores", lambda: 1)
        return build(request_of(llama, store, *recipes, gate=LENIENT), BuildProgress(io.StringIO()))


@pytest.mark.slow
def test_faster_gpu_engine_is_first(built: BuildResult) -> None:
    manifest = ArtifactManifest.read(built.directory)
    for_gpu = manifest.candidates_for(Device.GPU)
    assert {c.name: c.engine for c in for_gpu} == {
        "gpu-fp16": "onnxruntime",
        "gpu-fp16-torch": "torch",
    }
    paces = read_generation_report(built.directory).throughput
    first, second = (paces[candidate.name].batched for candidate in for_gpu)
    assert first >= second


@pytest.mark.slow
def test_sealed_program_opens_and_generates(built: BuildResult) -> None:
    manifest = ArtifactManifest.read(built.directory)
    (candidate,) = (c for c in manifest.candidates if c.engine == "torch")
    assert candidate.parity.batched_cosine_worst > 0.9999
    assert manifest.count_bytes(candidate) == manifest.files[candidate.graph].size
    spec = DecoderSpec.of(built.directory, manifest, candidate)
    decoder = open_decoder(spec, GeneratorSettings(kv_slots=2))
    try:
        assert isinstance(decoder, TorchDecoder)
        assert decoder.info.compute_type == "gpu-fp16"
        check_step(decoder)
    finally:
        decoder.close()
