"""Checkpoints that run in transformers: quantization, tensor parallelism, offload, rejections."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from build_artifacts import accuracy_gate
from build_artifacts.decoders import candidates as decoder_candidates
from build_artifacts.decoders.torch_export import check_model, export_checkpoint
from build_artifacts.errors import BuildError, UnsupportedModel
from build_artifacts.families import decoder as decoder_family
from build_artifacts.gpu_placement import with_gpu_attention, with_gpu_placement
from build_artifacts.pipeline import BuildResult, build
from build_artifacts.presets import (
    DECODER_FP16,
    DECODER_FP16_TRANSFORMERS,
    DECODER_GPU_INT8_BNB,
    DECODER_GPU_NF4_BNB,
    DECODER_INT8,
    FULL,
    LOW_MEMORY,
    QUICK,
)
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import DecoderRecipe
from deployments.artifacts.generation_config import EncoderDecoderConfig
from deployments.artifacts.manifest import ArtifactManifest, EngineOptions
from deployments.artifacts.types import Attention, Device, Precision
from deployments.config import GeneratorSettings
from deployments.engines import missing_requirement
from deployments.engines.decoder import DecoderSpec
from deployments.engines.decoder_factory import open_decoder
from deployments.engines.pytorch import tensor_parallel_decoder
from deployments.engines.pytorch.decoder import TorchDecoder
from deployments.engines.pytorch.tensor_parallel_decoder import TensorParallelDecoder
from tests.integration.compiler.decoders.test_build import LENIENT, request_of
from tests.integration.compiler.decoders.test_torch_export import check, check_step, logits_of
from tests.support import flash_attention, forked_programs
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.decoder_programs import WHOLE, spec_of, whole_spec
from tests.support.tiny_decoders import tiny_gpt2, tiny_llama

PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # `inner` must be a multiple of 64, the block size of bitsandbytes.
    return tiny_llama(tmp_path_factory.mktemp("source") / "llama", inner=128)


def run_checkpoint(spec: DecoderSpec) -> np.ndarray:
    """Return the logits after each token of a prompt and after one decode step."""
    decoder = open_decoder(spec, GeneratorSettings(kv_slots=2, max_context_tokens=128))
    try:
        every = decoder.prefill(0, PROMPT, 0, all_logits=True).copy()
        return np.vstack([every, decoder.decode(np.array([7]), np.array([len(PROMPT)]))])
    finally:
        decoder.close()


def test_export_checkpoint_runs_gpt2(tmp_path: Path) -> None:
    source = tiny_gpt2(tmp_path / "gpt2")
    check(whole_spec(source, tmp_path / "whole"), logits_of(source))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_export_checkpoint_converts_dtype(
    llama: Path, tmp_path: Path, precision: Precision
) -> None:
    spec = whole_spec(llama, tmp_path, replace(WHOLE, precision=precision))
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    size = spec.path.stat().st_size / (llama / "model.safetensors").stat().st_size
    assert size == pytest.approx(1.0 if precision == "fp32" else 0.5, abs=0.02)
    atol = {"fp32": 1e-4, "fp16": 0.2, "bf16": 2.0}[precision]
    np.testing.assert_allclose(
        run_checkpoint(spec)[:-1], logits_of(llama)[: len(PROMPT)], atol=atol
    )


@pytest.mark.parametrize(
    ("recipe", "least"),
    [(DECODER_GPU_INT8_BNB, 0.995), (DECODER_GPU_NF4_BNB, 0.9)],
    ids=lambda value: getattr(value, "name", None),
)
def test_export_checkpoint_quantizes_with_bitsandbytes(
    llama: Path, tmp_path: Path, recipe: DecoderRecipe, least: float
) -> None:
    halves = whole_spec(llama, tmp_path / "halves", DECODER_FP16_TRANSFORMERS)
    rounded = whole_spec(llama, tmp_path / "rounded", recipe)
    assert rounded.path.stat().st_size < 0.8 * halves.path.stat().st_size
    result, expected = run_checkpoint(rounded), run_checkpoint(halves)
    assert not np.allclose(result, expected, atol=0.05), "nothing was rounded"
    products = (result * expected).sum(axis=1)
    cosines = products / np.linalg.norm(result, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.mean() > least


def test_export_checkpoint_rejects_recipe_before_loading(llama: Path, tmp_path: Path) -> None:
    metadata = read_checkpoint_metadata(llama)
    source = EncoderDecoderConfig(max_source_tokens=64, decoder_start_token_id=0)
    behind_encoder = metadata.required_generation_config.model_copy(
        update={"encoder_decoder": source}
    )
    with pytest.raises(UnsupportedModel, match="with an encoder"):
        export_checkpoint(
            tmp_path, replace(metadata, generation_config=behind_encoder), WHOLE, tmp_path
        )
    two = EngineOptions(tensor_parallel_size=2)
    for recipe, message in (
        (replace(WHOLE, precision="int4"), "transformers does not support int4"),
        (replace(WHOLE, options=("block_size=16",)), "options of the model builder"),
        (replace(DECODER_GPU_NF4_BNB, run=two), "does not support bitsandbytes"),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            export_checkpoint(tmp_path, metadata, recipe, tmp_path)
    assert not list(tmp_path.iterdir())


def test_tensor_parallel_size_must_divide_kv_heads(llama: Path, tmp_path: Path) -> None:
    three = replace(WHOLE, run=EngineOptions(tensor_parallel_size=3))
    with pytest.raises(UnsupportedModel, match=r"2 KV heads cannot be split over 3 GPUs"):
        whole_spec(llama, tmp_path, three)


@pytest.mark.parametrize(
    ("config", "attention", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic"}}, "sdpa", "depends on the text length"),
        ({"rope_parameters": {"short_mscale": 1.2}}, "sdpa", "depends on the text length"),
        ({"rope_parameters": {"rope_type": "linear"}}, "sdpa", None),
        ({"attn_logit_softcapping": 50.0}, "sdpa", None),
        ({"sliding_window": 8}, "flash", None),
    ],
)
def test_check_model_rejects_unsupported_config(
    llama: Path, config: dict[str, Any], attention: Attention, message: str | None
) -> None:
    model = SimpleNamespace(config=SimpleNamespace(**config), named_parameters=list, modules=list)
    with pytest.raises(UnsupportedModel, match=message) if message else nullcontext():
        check_model(model, read_checkpoint_metadata(llama), attention)


def test_tensor_parallel_without_plan_is_rejected(tmp_path: Path) -> None:
    source = tiny_gpt2(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModel, match="no tensor parallel plan for `GPT2LMHeadModel`"):
        whole_spec(
            source, tmp_path / "whole", replace(WHOLE, run=EngineOptions(tensor_parallel_size=2))
        )


def test_missing_package_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.engines.find_spec", lambda name: 1)
    monkeypatch.setattr(
        "deployments.engines.pytorch.transformers_engine.find_spec", lambda name: None
    )
    spec = DecoderSpec(
        path=llama, engine="transformers", device=Device.GPU, precision="nf4",
        options=EngineOptions(), vocabulary=9, max_tokens=9,
        generation_config=read_checkpoint_metadata(llama).generation_config,
    )  # fmt: skip
    assert (
        missing_requirement(spec, GeneratorSettings())
        == "the package `bitsandbytes` is not installed"
    )
    assert missing_requirement(replace(spec, precision="fp16"), GeneratorSettings()) is None


def test_gpu_placement_replaces_gpu_recipes() -> None:
    assert with_gpu_placement(FULL, tensor_parallel_size=1, kv_offload=False) is FULL
    spread = with_gpu_placement(FULL, tensor_parallel_size=4, kv_offload=True)
    for_cpu = [each for each in FULL.decoders if each.device is Device.CPU]
    assert list(spread.decoders[:-2]) == for_cpu
    *_, half, last = spread.decoders
    assert (half.name, half.engine) == ("gpu-fp16-x4-offloaded", "transformers")
    assert (last.name, last.precision) == ("gpu-bf16-x4-offloaded", "bf16")
    assert {(each.run.tensor_parallel_size, each.run.kv_offload) for each in (half, last)} == {
        (4, True)
    }
    assert (
        spread.digest()
        != with_gpu_placement(FULL, tensor_parallel_size=2, kv_offload=True).digest()
        != FULL.digest()
    )


def test_attention_replaces_that_of_torch_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_gpu_attention(FULL, "sdpa") is FULL
    for_gpu = {each.name: each for each in with_gpu_attention(FULL, "eager").decoders}
    assert for_gpu["gpu-fp16-torch-eager"].run.attention == "eager"
    assert for_gpu["gpu-fp16-compiled-eager"].run.compile
    assert "gpu-fp16-torch" not in for_gpu
    assert for_gpu["gpu-fp16"].run.attention == "sdpa"  # the ONNX graph contains its attention
    assert with_gpu_attention(QUICK, "eager").decoders[0].name == "gpu-fp16-torch-eager"
    without_torch = replace(QUICK, decoders=(DECODER_INT8, DECODER_FP16))
    with pytest.raises(BuildError, match="`--attention eager` changes nothing"):
        with_gpu_attention(without_torch, "eager")
    with pytest.raises(BuildError, match="needs the package `flash_attn`"):
        with_gpu_attention(FULL, "flash")
    flash_attention.install(monkeypatch)
    *others, half, last = with_gpu_attention(FULL, "flash").decoders
    assert (half.name, half.engine) == ("gpu-fp16-transformers-flash", "transformers")
    assert (last.name, last.precision) == ("gpu-bf16-transformers-flash", "bf16")
    assert "torch" not in {each.engine for each in others}
    spread = with_gpu_placement(FULL, tensor_parallel_size=2, kv_offload=False)
    assert with_gpu_attention(spread, "flash").decoders[-1].name == "gpu-bf16-x2-flash"


def test_flash_attention_needs_its_package_and_a_gpu(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(WHOLE, run=EngineOptions(attention="flash"))
    spec = spec_of(llama, read_checkpoint_metadata(llama), recipe)
    assert (
        missing_requirement(spec, GeneratorSettings())
        == "the package `flash_attn` is not installed"
    )
    flash_attention.install(monkeypatch)
    assert missing_requirement(spec, GeneratorSettings()) == "`flash_attn` computes on GPUs only"


@pytest.mark.parametrize(("tensor_parallel_size", "kv_offload"), [(2, False), (1, True)])
def test_low_memory_rejects_gpu_placement(tensor_parallel_size: int, kv_offload: bool) -> None:
    assert with_gpu_placement(LOW_MEMORY, tensor_parallel_size=1, kv_offload=False) is LOW_MEMORY
    with pytest.raises(BuildError, match="built in fp16") as caught:
        with_gpu_placement(
            LOW_MEMORY, tensor_parallel_size=tensor_parallel_size, kv_offload=kv_offload
        )
    assert "`--search low-memory`" in caught.value.hint


@pytest.fixture(scope="module")
def _forked_processes() -> Iterator[None]:
    """Fork the processes of tensor parallelism, because their imports take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel_decoder, "_PROCESSES", forked_programs.PROCESSES)
        yield


@pytest.fixture(scope="module")
def built(
    llama: Path, tmp_path_factory: pytest.TempPathFactory, _forked_processes: None
) -> BuildResult:
    """A build on a simulated machine with two GPUs. All graphs run on the CPU."""
    store = tmp_path_factory.mktemp("store")
    spread = with_gpu_placement(FULL, tensor_parallel_size=2, kv_offload=False).decoders[-2]
    recipes = (DECODER_INT8, spread, DECODER_GPU_NF4_BNB)
    # Logits of random weights lie closer together than those of trained weights, so quantization
    # changes more of the next tokens.
    gate = LENIENT.model_copy(update={"next_token_agreement": 0.3})
    with pytest.MonkeyPatch.context() as patch:
        for module in (accuracy_gate, decoder_family):
            patch.setattr(module, "has_device", lambda device: True)
        patch.setattr(decoder_candidates, "usable_cores", lambda: 1)
        return build(request_of(llama, store, *recipes, gate=gate), BuildProgress(io.StringIO()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine"),
    [("gpu-fp16-x2", TensorParallelDecoder), ("gpu-nf4-bitsandbytes", TorchDecoder)],
)
def test_sealed_checkpoint_opens_and_generates(
    built: BuildResult, name: str, engine: type[TorchDecoder | TensorParallelDecoder]
) -> None:
    manifest = ArtifactManifest.read(built.directory)
    (candidate,) = (each for each in manifest.candidates if each.name == name)
    assert candidate.engine == "transformers"
    assert manifest.count_bytes(candidate) == manifest.files[candidate.graph].size
    spec = DecoderSpec.of(built.directory, manifest, candidate)
    decoder = open_decoder(spec, GeneratorSettings(kv_slots=2))
    try:
        assert isinstance(decoder, engine)
        check_step(decoder)
    finally:
        decoder.close()
