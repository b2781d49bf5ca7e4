"""Decoder contract for the torch engine, with the tiny Llama as the compiler exports it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="`torch` is not installed")
pytest.importorskip("transformers", reason="`transformers` is not installed")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from deployments.artifacts.generation_config import EncoderDecoderConfig  # noqa: E402
from deployments.artifacts.manifest import ArtifactManifest, EngineOptions  # noqa: E402
from deployments.artifacts.types import Device  # noqa: E402
from deployments.config import GeneratorSettings  # noqa: E402
from deployments.engines import missing_requirement  # noqa: E402
from deployments.engines.decoder import DecoderSpec  # noqa: E402
from deployments.engines.decoder_factory import (  # noqa: E402
    find_decoder_factory,
    kv_bytes_per_token,
    open_decoder,
    select_candidate,
)
from deployments.engines.pytorch import decoder as torch_decoder  # noqa: E402
from deployments.engines.pytorch import transformers_engine  # noqa: E402
from deployments.engines.pytorch.decoder import TorchDecoder  # noqa: E402
from deployments.engines.pytorch.program import write_program  # noqa: E402
from deployments.errors import EngineFailed  # noqa: E402
from tests.integration.engines.conftest import OpenRows, rows_of  # noqa: E402
from tests.support import flash_attention  # noqa: E402
from tests.support.decoder_artifacts import seal_tiny_decoder  # noqa: E402
from tests.support.decoder_contract import check_batch_invariance  # noqa: E402
from tests.support.decoder_programs import PROGRAM, WHOLE, program_spec, whole_spec  # noqa: E402
from tests.support.tiny_decoders import tiny_llama  # noqa: E402

PROMPT = list(range(10, 45))
OTHER = list(range(90, 40, -1))
# Matrix products round differently for one row than for several rows.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("checkpoint"))


RECIPES = {
    "program": PROGRAM,
    "checkpoint": WHOLE,
    "eager": replace(WHOLE, run=EngineOptions(attention="eager")),
    "flash": replace(WHOLE, run=EngineOptions(attention="flash")),
    "offloaded": replace(WHOLE, run=EngineOptions(kv_offload=True)),
}


@pytest.fixture(scope="module", autouse=True)
def _flash_attention() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        flash_attention.install(patch)
        patch.setattr(transformers_engine, "uses_cuda", lambda _: True)  # required by flash
        yield


@pytest.fixture(scope="module", params=RECIPES)
def spec(
    checkpoint: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> DecoderSpec:
    recipe, into = RECIPES[request.param], tmp_path_factory.mktemp(request.param)
    write = program_spec if recipe.engine == "torch" else whole_spec
    return write(checkpoint, into, recipe)


@pytest.fixture
def open_rows(spec: DecoderSpec) -> Iterator[OpenRows]:
    with rows_of(TorchDecoder, spec) as open_:
        yield open_


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, atol=CLOSE)


def test_logits_match_transformers(checkpoint: Path, open_rows: OpenRows) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    decoder = open_rows()
    assert_close(decoder.prefill(2, PROMPT, 0, all_logits=True), expected)
    assert_close(decoder.prefill(1, PROMPT[:-2], 0), expected[-3])
    for place in (len(PROMPT) - 2, len(PROMPT) - 1):
        ids, lengths = np.array([0, PROMPT[place]]), np.array([0, place])
        assert_close(decoder.decode(ids, lengths)[1], expected[place])


@pytest.mark.parametrize("part", [1, 2, 7, 16, 33])
def test_chunked_prefill_matches_whole_prefill(open_rows: OpenRows, part: int) -> None:
    expected = open_rows().prefill(0, PROMPT, 0).copy()
    decoder = open_rows()
    for start in range(0, len(PROMPT), part):
        logits = decoder.prefill(1, PROMPT[start : start + part], start)
    assert_close(logits, expected)


@pytest.mark.parametrize("context", [63, 64, 65, 128])
def test_slot_fits_its_last_token(open_rows: OpenRows, context: int) -> None:
    ids = (np.arange(context) % 200).tolist()
    decoder = open_rows(context=context)
    expected = decoder.prefill(0, ids, 0).copy()
    decoder.prefill(1, ids[:-1], 0)
    assert_close(decoder.decode(np.array([0, ids[-1]]), np.array([0, context - 1]))[1], expected)


def test_decode_is_batch_invariant(open_rows: OpenRows) -> None:
    single, batched = open_rows(slots=1), open_rows(slots=3)
    check_batch_invariance(single, batched, (PROMPT, OTHER), assert_close)


def test_tokens_beyond_the_valid_length_are_ignored(open_rows: OpenRows) -> None:
    fresh, used = open_rows(), open_rows()
    used.prefill(0, OTHER * 2, 0)
    for decoder in (fresh, used):
        decoder.prefill(0, PROMPT, 0)
    step = np.array([5]), np.array([len(PROMPT)])
    assert_close(used.decode(*step), fresh.decode(*step))


def test_compiled_steps_match_those_of_the_program(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend `aot_eager` traces like `inductor`, but skips a minute of code generation."""
    monkeypatch.setattr(torch_decoder, "_COMPILER", "aot_eager")
    plain = program_spec(checkpoint, tmp_path)
    compiled = replace(plain, options=EngineOptions(compile=True))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with rows_of(TorchDecoder, plain) as open_plain, rows_of(TorchDecoder, compiled) as open_other:
        decoders = open_plain(slots=4), open_other(slots=4)
        for decoder in decoders:
            for slot in range(4):
                decoder.prefill(slot, PROMPT[slot:], 0)
        for slots in (1, 3, 4, 2, 1):
            for tokens in (len(PROMPT) - 3, decoders[0].info.context - 1):
                step = np.arange(5, 5 + slots), np.full(slots, tokens)
                assert_close(*(decoder.decode(*step) for decoder in decoders))
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert counted <= 2, "one graph for one slot, and one for more, whatever their length"


def test_nan_does_not_reach_the_next_job_of_a_slot(checkpoint: Path, tmp_path: Path) -> None:
    spec = program_spec(checkpoint, tmp_path, broken_token=99)
    decoder = TorchDecoder(spec, GeneratorSettings(), slots=1, context=128)
    expected = decoder.prefill(0, PROMPT, 0).copy()
    assert np.isnan(decoder.prefill(0, [1, 2, 99] * 25, 0)).all()
    assert_close(decoder.prefill(0, PROMPT, 0), expected)
    decoder.close()


def test_full_slot_may_take_part_in_decode(open_rows: OpenRows) -> None:
    decoder = open_rows(context=64)
    decoder.prefill(1, PROMPT, 0)
    step = np.array([1, 5]), np.array([64, len(PROMPT)])
    expected = decoder.decode(*step)[1].copy()
    assert_close(decoder.decode(np.array([1, 5]), np.array([3, len(PROMPT)]))[1], expected)


def test_copied_prefix_matches_computed_prefix(open_rows: OpenRows) -> None:
    decoder = open_rows()
    decoder.prefill(0, PROMPT[:30], 0)
    computed = decoder.prefill(0, PROMPT[30:], 30).copy()
    decoder.copy(0, 2, 30)
    np.testing.assert_array_equal(decoder.prefill(2, PROMPT[30:], 30), computed)


def test_swapped_slots_continue(open_rows: OpenRows) -> None:
    straight, crossed = open_rows(), open_rows()
    for decoder in (straight, crossed):
        decoder.prefill(0, PROMPT, 0)
        decoder.prefill(1, OTHER, 0)
    crossed.swap(0, 1, max(len(PROMPT), len(OTHER)))
    ids, lengths = np.array([5, 6]), np.array([len(PROMPT), len(OTHER)])
    expected = straight.decode(ids, lengths).copy()
    assert_close(crossed.decode(ids[::-1].copy(), lengths[::-1].copy())[::-1], expected)
    assert np.abs(expected[0] - expected[1]).max() > 1


def test_close_frees_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    decoder = TorchDecoder(
        whole_spec(checkpoint, tmp_path, WHOLE), GeneratorSettings(), slots=1, context=64
    )
    decoder.prefill(0, PROMPT, 0)
    weights = [weakref.ref(weight) for weight in decoder.loaded.module.model.parameters()]
    assert weights
    decoder.close()
    assert [weight() for weight in weights] == [None] * len(weights)


def test_closed_decoder_fails(open_rows: OpenRows) -> None:
    decoder = open_rows()
    decoder.close()
    decoder.close()
    for call in (
        lambda: decoder.prefill(0, PROMPT, 0),
        lambda: decoder.decode(np.zeros(1, np.int64), np.zeros(1, np.int64)),
        lambda: decoder.copy(0, 1, 2),
        lambda: decoder.swap(0, 1, 2),
    ):
        with pytest.raises(EngineFailed, match="closed"):
            call()


def test_tokens_out_of_bounds_are_rejected(open_rows: OpenRows) -> None:
    decoder = open_rows(context=64)
    with pytest.raises(EngineFailed, match="exceed the context of 64"):
        decoder.prefill(0, PROMPT, 30)
    with pytest.raises(EngineFailed, match="the maximum is 265"):
        decoder.prefill(0, [decoder.info.vocabulary], 0)


def test_open_decoder_uses_the_engine_of_the_spec(spec: DecoderSpec) -> None:
    one_row = 64 * kv_bytes_per_token(spec)
    settings = GeneratorSettings(kv_slots=8, max_context_tokens=64, kv_cache_bytes=3 * one_row)
    decoder = open_decoder(spec, settings)
    assert isinstance(decoder, TorchDecoder)
    assert (decoder.info.slots, decoder.info.context) == (3, 64)
    assert decoder.loaded.kv_arrays.slots == 3
    decoder.close()
    with pytest.raises(EngineFailed, match="openvino does not run generative models"):
        find_decoder_factory(replace(spec, engine="openvino"))
    source = EncoderDecoderConfig(max_source_tokens=64, decoder_start_token_id=0)
    behind_encoder = spec.generation_config.model_copy(update={"encoder_decoder": source})
    with pytest.raises(EngineFailed, match=f"{spec.engine} does not run encoder-decoder models"):
        open_decoder(replace(spec, generation_config=behind_encoder), settings)


def test_program_of_the_last_release_has_equal_layers(checkpoint: Path, tmp_path: Path) -> None:
    """Version 0.1 did not write the shapes of inputs."""
    spec = program_spec(checkpoint, tmp_path)
    expected = prefill_whole(spec)
    with safe_open(spec.path, framework="pt") as file:
        nodes = json.loads(file.metadata()["program"])
    weights = load_file(spec.path)
    assert sum("shape" in node for node in nodes) == 7
    nodes = [{key: node[key] for key in node if key != "shape"} for node in nodes]
    save_file(weights, spec.path, {"program": json.dumps(nodes)})
    assert_close(prefill_whole(spec), expected)


def prefill_whole(spec: DecoderSpec) -> np.ndarray:
    decoder = TorchDecoder(spec, GeneratorSettings(), slots=1, context=64)
    try:
        return decoder.prefill(0, PROMPT, 0).copy()
    finally:
        decoder.close()


def test_model_of_another_shape_is_rejected(spec: DecoderSpec) -> None:
    taller = spec.generation_config.model_copy(update={"layers": 3})
    expected = {
        "torch": "the program has the inputs input_ids, lengths",
        "transformers": r"has \(2, 266\) layers with keys and tokens; expected \(3,",
    }
    with pytest.raises(EngineFailed, match=expected[spec.engine]):
        open_decoder(replace(spec, generation_config=taller), GeneratorSettings())


def test_program_writes_by_few_operators_only(tmp_path: Path) -> None:
    class Subtracting(torch.nn.Module):
        def forward(self, input_ids, memory):
            return memory.sub_(input_ids)

    with torch.no_grad():
        example = {"input_ids": torch.ones(2, 3), "memory": torch.zeros(2, 3)}
        program = torch.export.export(Subtracting(), (), example)
    with pytest.raises(EngineFailed, match=r"cannot call `aten\.sub_"):
        write_program(program, tmp_path / "p", in_place=True)


def test_write_through_a_view_is_not_dropped(tmp_path: Path) -> None:
    """No other node depends on such a write."""

    class Clearing(torch.nn.Module):
        def forward(self, input_ids):
            copied = input_ids + 1
            copied[:, 0] = 0
            return copied

    with torch.no_grad():
        program = torch.export.export(Clearing(), (), {"input_ids": torch.ones(2, 3)})
    with pytest.raises(EngineFailed, match=r"cannot call `aten\.\w+_\."):
        write_program(program, tmp_path / "p", in_place=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device_is_named(spec: DecoderSpec) -> None:
    settings = GeneratorSettings(providers=("CUDAExecutionProvider",))
    with pytest.raises(EngineFailed, match="torch sees no CUDA device"):
        open_decoder(spec, settings)
    with pytest.raises(EngineFailed, match="torch sees no CUDA device"):
        TorchDecoder(spec, settings, slots=1, context=64)


def test_bf16_needs_instructions_of_the_gpu(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = GeneratorSettings(providers=("CUDAExecutionProvider",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: False)
    reason = missing_requirement(replace(spec, precision="bf16"), settings)
    assert reason == "this GPU has no bf16 instructions (compute capability below 8.0)"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert missing_requirement(replace(spec, precision="fp16"), settings) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_select_candidate_returns_the_fastest_runnable(tmp_path: Path) -> None:
    manifest = ArtifactManifest.read(seal_tiny_decoder(tmp_path))
    (sealed,) = manifest.candidates
    options = EngineOptions(providers=("CPUExecutionProvider",))
    onnx = sealed.model_copy(update={"options": options})
    by_torch = onnx.model_copy(update={"engine": "torch"})
    both = manifest.model_copy(update={"candidates": (by_torch, onnx)})
    on_gpu = GeneratorSettings(providers=("CUDAExecutionProvider",))
    assert select_candidate(both, Device.CPU, GeneratorSettings()) is by_torch
    assert select_candidate(both, Device.CPU, on_gpu) is onnx, "torch sees no CUDA device"
    only_torch = manifest.model_copy(update={"candidates": (by_torch,)})
    assert select_candidate(only_torch, Device.CPU, on_gpu) is by_torch, (
        "the first candidate, whose opening reports the missing requirement"
    )
    assert select_candidate(both, Device.GPU, on_gpu) is None
