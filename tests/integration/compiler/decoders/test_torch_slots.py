"""KV slots of torch engines that hold more than equal keys and values in all layers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from build_artifacts.errors import UnsupportedModel
from build_artifacts.presets import DECODER_GPU_INT8_BNB
from deployments.artifacts.manifest import EngineOptions
from deployments.config import GeneratorSettings, SchedulingSettings
from deployments.engines.decoder import DecoderSpec
from deployments.engines.decoder_factory import measure_kv_cache
from deployments.engines.pytorch import captured_calls
from deployments.engines.pytorch.decoder import TorchDecoder
from deployments.errors import EngineFailed
from tests.support import flash_attention
from tests.support.decoder_families import MAMBA2, OWN, write_decoder
from tests.support.decoder_programs import WHOLE, program_spec, whole_spec
from tests.support.recurrent_slots import (
    FIRST,
    LAST_CHUNK,
    PROMPT,
    answer,
    check_slots_move,
    read_prompt,
)
from tests.support.scheduler_harness import SchedulerHarness

pytestmark = pytest.mark.slow

RECURRENT: dict[str, dict[str, Any]] = {
    "Lfm2ForCausalLM": {},
    "Qwen3_5ForCausalLM": {},
    "GraniteMoeHybridForCausalLM": MAMBA2,
    "FalconH1ForCausalLM": {},
}
GEMMA4, LATENT = "Gemma4ForCausalLM", "DeepseekV3ForCausalLM"
CLOSE = 2e-4  # chunks and batches round differently


def write(architecture: str, directory: Path, changes: Mapping[str, Any] = {}) -> Path:
    checkpoint = directory / "checkpoint"
    write_decoder(architecture, checkpoint, OWN[architecture] | dict(changes))
    return checkpoint


def open_slots(spec: DecoderSpec) -> closing[TorchDecoder]:
    return closing(TorchDecoder(spec, GeneratorSettings(), slots=3, context=128))


@pytest.fixture(scope="module", params=RECURRENT)
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderSpec:
    directory = tmp_path_factory.mktemp("recurrent")
    checkpoint = write(request.param, directory, RECURRENT[request.param])
    return whole_spec(checkpoint, directory / "whole")


@pytest.fixture
def engine(spec: DecoderSpec) -> Iterator[TorchDecoder]:
    with open_slots(spec) as decoder:
        yield decoder


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, atol=CLOSE)


def test_prompt_continues_at_its_last_chunk(engine: TorchDecoder) -> None:
    assert engine.info.is_recurrent
    whole = engine.prefill(1, PROMPT, 0).copy()
    whole_answer = answer(engine, 1)
    assert_close(read_prompt(engine, 0), whole)
    assert_close(answer(engine, 0), whole_answer)
    again = engine.prefill(0, PROMPT[LAST_CHUNK:], LAST_CHUNK).copy()
    assert_close(again, whole)
    assert_close(answer(engine, 0), whole_answer)
    with pytest.raises(EngineFailed, match="has states after 64 and 44 tokens, not after 24"):
        engine.prefill(0, PROMPT[FIRST:], FIRST)


def test_states_move_with_their_slot(engine: TorchDecoder) -> None:
    check_slots_move(engine, assert_close)


def test_capture_of_a_step_reads_its_tokens_once(
    spec: DecoderSpec, engine: TorchDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture runs the step several times before it records it."""

    def capture(call: Callable[[], None], *_: object, **__: object) -> Any:
        for _ in range(3):
            call()
        return CapturedCallOnHost(call)

    monkeypatch.setattr(captured_calls, "capture", capture)
    read_prompt(engine, 1)
    expected = answer(engine, 1)
    with open_slots(spec) as captured:
        captured._captures = True
        read_prompt(captured, 1)
        assert_close(answer(captured, 1), expected)
        assert captured._captured.calls


class CapturedCallOnHost:
    """A fake of `CapturedCall` that repeats the computation."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.replay = call


def test_new_prompt_forgets_the_states_of_the_slot(engine: TorchDecoder) -> None:
    expected = engine.prefill(1, PROMPT, 0).copy()
    first = engine.decode(np.array([9]), np.array([0])).copy()
    read_prompt(engine, 0)
    assert_close(engine.prefill(0, PROMPT, 0), expected)
    assert_close(engine.decode(np.array([9]), np.array([0])), first)


@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_recurrent_decoder_has_every_attention(
    attention: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_attention.install(monkeypatch)
    checkpoint = write("Qwen3_5ForCausalLM", tmp_path)
    recipe = replace(WHOLE, run=EngineOptions(attention=attention))
    logits = []
    for each in (WHOLE, recipe):
        with open_slots(whole_spec(checkpoint, tmp_path / each.run.attention, each)) as decoder:
            read_prompt(decoder, 1)
            logits.append(answer(decoder, 1))
    assert_close(logits[1], logits[0])


@pytest.mark.parametrize("architecture", [GEMMA4, LATENT, "Lfm2ForCausalLM"])
def test_kv_cache_in_host_memory_changes_no_answer(architecture: str, tmp_path: Path) -> None:
    checkpoint = write(architecture, tmp_path)
    offloaded = replace(WHOLE, run=EngineOptions(kv_offload=True))
    logits = []
    for name, recipe in (("device", WHOLE), ("host", offloaded)):
        with open_slots(whole_spec(checkpoint, tmp_path / name, recipe)) as decoder:
            read_prompt(decoder, 1)
            logits.append(answer(decoder, 1))
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("architecture", [GEMMA4, LATENT])
def test_unequal_arrays_move_and_are_counted(architecture: str, tmp_path: Path) -> None:
    checkpoint = write(architecture, tmp_path)
    (tmp_path / "graph").mkdir()
    settings = GeneratorSettings(kv_slots=3, max_context_tokens=128)
    for spec in (
        whole_spec(checkpoint, tmp_path / "whole"),
        program_spec(checkpoint, tmp_path / "graph"),
    ):
        with open_slots(spec) as decoder:
            assert len(set(decoder.loaded.kv_arrays._shapes)) == 2
            assert decoder.loaded.kv_arrays.nbytes == measure_kv_cache(spec, settings)
            check_slots_move(decoder, assert_close)


def test_steps_project_no_cached_latent_vectors(tmp_path: Path) -> None:
    """The keys and values of all heads would take many times the memory of the vectors."""
    spec = whole_spec(write(LATENT, tmp_path), tmp_path / "whole")
    with open_slots(spec) as decoder:
        decoder.prefill(0, PROMPT, 0)
        (projection, *_) = (
            module
            for name, module in decoder.loaded.module.model.named_modules()
            if name.endswith("kv_b_proj")
        )
        projection.forward = Mock(side_effect=AssertionError("a projection of cached vectors"))
        answer(decoder, 0)


def test_int8_weights_of_latent_attention_are_refused(tmp_path: Path) -> None:
    checkpoint = write("MiniCPM3ForCausalLM", tmp_path)
    with pytest.raises(UnsupportedModel, match="int8 does not support latent attention"):
        whole_spec(checkpoint, tmp_path / "whole", DECODER_GPU_INT8_BNB)


def test_steps_of_gemma3n_do_not_wait_for_the_host(tmp_path: Path) -> None:
    """A CUDA graph cannot: neither for a tensor from a number nor for a check of values."""
    spec = whole_spec(write("Gemma3nForCausalLM", tmp_path), tmp_path / "whole")
    with open_slots(spec) as decoder, RecordedOperators() as recorded, torch.inference_mode():
        decoder.loaded.step(2, 64)
    waiting = ("lift_fresh", "_local_scalar_dense", "is_nonzero", "_is_all_true")
    assert "aten.cat.default" in recorded.names
    assert not recorded.names & {f"aten.{name}.default" for name in waiting}


class RecordedOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def test_offloaded_cache_leaves_the_states_on_the_device(tmp_path: Path) -> None:
    offloaded = replace(WHOLE, run=EngineOptions(kv_offload=True))
    spec = whole_spec(write("Lfm2ForCausalLM", tmp_path), tmp_path / "whole", offloaded)
    settings = GeneratorSettings(kv_slots=3, max_context_tokens=128)
    assert measure_kv_cache(spec, settings) == 3 * 2 * 4 * spec.generation_config.state_values


def test_latent_vectors_take_less_memory_than_keys_and_values(tmp_path: Path) -> None:
    checkpoint, settings = write(LATENT, tmp_path), GeneratorSettings(max_context_tokens=128)
    spec = whole_spec(checkpoint, tmp_path / "whole")
    config = spec.generation_config
    one_slot = 128 * config.layers * (40 + 16) * 4
    assert measure_kv_cache(spec, settings) == settings.kv_slots * one_slot
    graph = replace(spec, engine="onnxruntime")
    assert measure_kv_cache(graph, settings) > 4 * settings.kv_slots * one_slot


@pytest.mark.parametrize("architecture", [GEMMA4, LATENT, "Qwen3_5ForCausalLM"])
def test_tensor_parallelism_needs_equal_layers(architecture: str, tmp_path: Path) -> None:
    checkpoint = write(architecture, tmp_path)
    recipe = replace(WHOLE, run=EngineOptions(tensor_parallel_size=2))
    with pytest.raises(UnsupportedModel, match="needs equal KV heads in all layers"):
        whole_spec(checkpoint, tmp_path / "whole", recipe)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [(LATENT, {}), (GEMMA4, {"head_dim": 128, "global_head_dim": 512})],
)
def test_flash_attention_needs_small_heads_of_one_size(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = write(architecture, tmp_path, changes)
    recipe = replace(WHOLE, run=EngineOptions(attention="flash"))
    with pytest.raises(UnsupportedModel, match="needs keys and values of one size") as caught:
        whole_spec(checkpoint, tmp_path / "whole", recipe)
    assert "--attention sdpa" in caught.value.hint


def test_answers_under_load_are_those_alone(tmp_path: Path) -> None:
    """Many prompts begin alike, so that some continue from the states of others."""
    spec = whole_spec(write("Qwen3_5ForCausalLM", tmp_path), tmp_path / "whole")
    rng = random.Random(0)
    system, *rest = (rng.choices(range(8, 250), k=size) for size in (70, *range(10, 40)))
    prompts = [[*system, *each] if number % 3 else each for number, each in enumerate(rest)]
    alone, together = (open_scheduler(spec, slots) for slots in (1, 5))
    with alone as first, together as second:
        expected = [answer for prompt in prompts for answer in first.run_jobs(first.job(prompt))]
        jobs = [second.job(prompt) for prompt in prompts]
        assert second.run_jobs(*jobs) == expected
        assert sum(second.collector.started(job).cached_tokens for job in jobs) > 0


@contextmanager
def open_scheduler(spec: DecoderSpec, slots: int) -> Iterator[SchedulerHarness]:
    rules = SchedulingSettings(max_prefill_chunk_tokens=32, min_prefill_chunk_tokens=8)
    with closing(TorchDecoder(spec, GeneratorSettings(), slots=slots, context=128)) as decoder:
        harness = SchedulerHarness(decoder, rules)
        harness.scheduler.start()
        with closing(harness.scheduler):
            yield harness
