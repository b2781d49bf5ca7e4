"""Fallbacks of decoder recipes and their order, with a fake model builder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from build_artifacts.accuracy_gate import AccuracyGate
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.decoders import candidates as decoder_candidates
from build_artifacts.decoders import int8_kv_cache
from build_artifacts.decoders.int8_kv_cache import has_int8_kv_cache
from build_artifacts.decoders.reference import DecoderReference
from build_artifacts.errors import GateFailed, UnsupportedModel
from build_artifacts.families.base import BuildBudget, BuildContext
from build_artifacts.families.decoder import DecoderBuild, DecoderCandidate
from build_artifacts.families.encoder_decoder import EncoderDecoderBuild
from build_artifacts.presets import DECODER_INT4, DECODER_INT8
from build_artifacts.recipes import DECODER_FP32, BuildRecipe, DecoderRecipe
from deployments.artifacts.generation_config import EncoderDecoderConfig, GenerationConfig
from deployments.artifacts.manifest import Gate
from deployments.artifacts.types import Device, KvCacheDtype, TaskName
from deployments.engines.decoder import DecoderSpec
from tests.support.attention_graphs import SHOWN, GraphChange, float_graph, packed, sinking
from tests.support.decoder_graphs import CONTEXT, VOCABULARY, build_reference, spec_of
from tests.support.prepared_build import RecordingRunner

FIRST, SECOND, THIRD = ("bits=4",), ("bits=5",), ("bits=6", "blocks=7")
PLAIN = DecoderRecipe(name="cpu-int4", device=Device.CPU, precision="fp32", kv_cache_dtype="int8")
SEVERAL = replace(PLAIN, options=FIRST, other_options=(SECOND, THIRD))
HOPELESS = Gate(perplexity_increase=-0.5)


class Builder:
    """Fake model builder that writes the same tiny graph for any recipe and records its calls."""

    def __init__(self) -> None:
        self.gate_inputs: list[tuple[tuple[str, ...], KvCacheDtype | None]] = []
        self.attention: GraphChange = packed
        self.refuses = False

    def export(
        self, weights: Path, metadata: CheckpointMetadata, recipe: DecoderRecipe, into: Path
    ) -> None:
        self.gate_inputs.append((recipe.options, recipe.kv_cache_dtype))
        if self.refuses:
            raise UnsupportedModel("no such graph", hint="none")
        float_graph(into / "model.onnx", self.attention)
        (into / "model.onnx.data").touch()


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    builder = Builder()
    monkeypatch.setattr(decoder_candidates, "export_decoder", builder.export)
    monkeypatch.setattr(
        decoder_candidates, "load_calibration_inputs", lambda weights, max_tokens: SHOWN
    )
    return builder


@pytest.fixture
def runner(tmp_path: Path) -> RecordingRunner:
    return RecordingRunner(tmp_path / "building")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> DecoderReference:
    return build_reference(float_graph(tmp_path_factory.mktemp("original") / "model.onnx"))


@pytest.fixture
def coarse_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the int8 KV cache inaccurate."""
    monkeypatch.setattr(int8_kv_cache, "SCALE_MARGIN", 0.01)


def build_metadata(task: TaskName, generation_config: GenerationConfig) -> CheckpointMetadata:
    return CheckpointMetadata(
        tasks=(task,),
        architecture="Tiny",
        max_tokens=CONTEXT,
        output_width=VOCABULARY,
        generation_config=generation_config,
    )


def build_gate(
    runner: RecordingRunner,
    original: DecoderReference,
    gate: Gate,
    metadata: CheckpointMetadata | None = None,
) -> AccuracyGate[DecoderRecipe, DecoderSpec]:
    generation_config = spec_of(Path()).generation_config
    context = BuildContext(
        steps=runner.steps,
        weights=Path(),
        metadata=metadata or build_metadata(TaskName.TEXT_GENERATION, generation_config),
        recipe=BuildRecipe(candidates=(), gate=gate),
        budget=BuildBudget(),
    )
    kind = EncoderDecoderBuild if metadata else DecoderBuild
    return AccuracyGate(runner.steps, kind(context, original))


def admit(
    runner: RecordingRunner,
    original: DecoderReference,
    recipe: DecoderRecipe,
    gate: Gate | None = None,
) -> DecoderCandidate | None:
    return build_gate(runner, original, gate or Gate()).first_accepted(recipe)


@pytest.mark.parametrize("recipe", [SEVERAL, DECODER_INT8], ids=lambda recipe: recipe.name)
def test_accepted_graph_has_int8_kv_cache(
    builder: Builder, runner: RecordingRunner, original: DecoderReference, recipe: DecoderRecipe
) -> None:
    passed = admit(runner, original, recipe)
    assert passed is not None
    assert (passed.recipe.options, passed.recipe.kv_cache_dtype) == (recipe.options, "int8")
    assert passed.spec.kv_cache_dtype == "int8"
    assert has_int8_kv_cache(passed.spec.path)
    assert passed.is_accepted
    assert 0.99 < passed.parity.cosine_mean < 1 - 1e-7, "nothing was rounded"
    assert len(builder.gate_inputs) == 1


def test_last_fallback_drops_int8_kv_cache(
    builder: Builder, runner: RecordingRunner, original: DecoderReference
) -> None:
    assert admit(runner, original, SEVERAL, HOPELESS) is None
    assert builder.gate_inputs == [
        (FIRST, "int8"),
        (SECOND, "int8"),
        (THIRD, "int8"),
        (THIRD, None),
    ]
    verified = [line.partition(" against")[0] for line in runner.lines("gate")]
    assert verified == [
        "cpu-int4, bits=4, int8 KV cache",
        "cpu-int4, bits=5, int8 KV cache",
        "cpu-int4, bits=6, blocks=7, int8 KV cache",
        "cpu-int4, bits=6, blocks=7",
    ]


@pytest.mark.usefixtures("coarse_scales")
@pytest.mark.parametrize("recipe", [PLAIN, DECODER_INT8], ids=lambda recipe: recipe.name)
def test_fallback_without_int8_kv_cache_is_float(
    builder: Builder, runner: RecordingRunner, original: DecoderReference, recipe: DecoderRecipe
) -> None:
    passed = admit(runner, original, recipe)
    assert passed is not None
    assert passed.recipe == replace(recipe, kv_cache_dtype=None)
    assert passed.spec.kv_cache_dtype is None
    assert not has_int8_kv_cache(passed.spec.path)
    rejected, accepted = runner.lines("gate")
    assert "int8 KV cache against fp32 torch: rejected" in rejected
    assert f"{recipe.name} against fp32 torch: accepted" in accepted


def test_int8_candidates_share_float_export(
    builder: Builder, runner: RecordingRunner, original: DecoderReference
) -> None:
    assert admit(runner, original, DECODER_INT8, HOPELESS) is None
    assert builder.gate_inputs == [((), None)]
    assert runner.lines("export") == ["cpu-fp32: 0.0 MB"]
    assert len(runner.lines("quantize")) == len(runner.lines("gate")) == 2


def test_recipe_without_int8_kv_cache_is_unchanged(
    builder: Builder, runner: RecordingRunner, original: DecoderReference
) -> None:
    passed = admit(runner, original, replace(SEVERAL, kv_cache_dtype=None))
    assert passed is not None
    assert passed.spec.kv_cache_dtype is None
    assert passed.is_accepted
    assert passed.parity.cosine_worst > 1 - 1e-6
    assert builder.gate_inputs == [(FIRST, None)]


def test_unsupported_int8_kv_cache_evaluates_float(
    builder: Builder, runner: RecordingRunner, tmp_path: Path
) -> None:
    builder.attention = sinking
    original = build_reference(float_graph(tmp_path / "model.onnx", sinking))
    passed = admit(runner, original, PLAIN)
    assert passed is not None
    assert passed.spec.kv_cache_dtype is None
    assert not has_int8_kv_cache(passed.spec.path)


def test_unsupported_int8_kv_cache_evaluates_once(
    builder: Builder, runner: RecordingRunner, original: DecoderReference
) -> None:
    builder.attention = sinking
    assert admit(runner, original, SEVERAL, HOPELESS) is None
    assert builder.gate_inputs == [(FIRST, "int8"), (SECOND, "int8"), (THIRD, "int8")]


@pytest.mark.parametrize("recipe", [SEVERAL, DECODER_INT4, DECODER_INT8], ids=lambda r: r.name)
def test_encoder_decoder_has_no_int8_kv_cache(
    builder: Builder, runner: RecordingRunner, original: DecoderReference, recipe: DecoderRecipe
) -> None:
    builder.refuses = True
    source = EncoderDecoderConfig(max_source_tokens=CONTEXT, decoder_start_token_id=1)
    generation_config = spec_of(Path()).generation_config.model_copy(
        update={"encoder_decoder": source}
    )
    metadata = build_metadata(TaskName.TRANSLATION, generation_config)
    gate = build_gate(runner, original, Gate(), metadata)
    assert gate.first_accepted(recipe) is None
    assert builder.gate_inputs == [
        (options, None) for options in (recipe.options, *recipe.other_options)
    ]
    assert not any("KV cache" in line for line in runner.output.getvalue().splitlines())


def test_failure_without_graphs_is_unsupported_model(
    builder: Builder, runner: RecordingRunner, original: DecoderReference
) -> None:
    builder.refuses = True
    admission = build_gate(runner, original, Gate())
    assert [admission.first_accepted(recipe) for recipe in (SEVERAL, DECODER_FP32)] == [None, None]
    failure = admission.failure()
    assert isinstance(failure, UnsupportedModel)
    assert (failure.message, failure.hint) == ("no such graph", "none")


def test_failed_fallback_hint_names_the_exporter(
    builder: Builder, runner: RecordingRunner, original: DecoderReference
) -> None:
    admission = build_gate(runner, original, HOPELESS)
    assert admission.first_accepted(DECODER_FP32) is None
    failure = admission.failure()
    assert isinstance(failure, GateFailed)
    assert "no graph of `Tiny` for the CPU passed the accuracy gate (fp32: perpl" in failure.message
    assert "does not compute what the model computes" in failure.hint
    assert "damaged" not in failure.hint


def test_hint_for_a_graph_that_does_not_run_is_not_about_its_accuracy(
    builder: Builder, runner: RecordingRunner, original: DecoderReference
) -> None:
    builder.attention = lambda graph: graph.node[0].ClearField("input")
    admission = build_gate(runner, original, Gate())
    assert admission.first_accepted(DECODER_FP32) is None
    assert admission.failure().hint.startswith("the build log has the details; ONNX Runtime may")


def test_unsupported_fallback_is_reported_in_hint(
    builder: Builder, runner: RecordingRunner, original: DecoderReference
) -> None:
    admission = build_gate(runner, original, HOPELESS)
    assert admission.first_accepted(SEVERAL) is None
    builder.refuses = True
    assert admission.first_accepted(DECODER_FP32) is None
    failure = admission.failure()
    assert isinstance(failure, GateFailed)
    assert failure.hint == "a more accurate graph cannot be built: no such graph"
