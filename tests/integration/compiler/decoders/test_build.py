"""Builds of a tiny Llama from checkpoint to artifact, with the real model builder."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from build_artifacts.__main__ import main
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.models import count_parameters
from build_artifacts.decoders.generation_report import read_generation_report
from build_artifacts.errors import BuildError, GateFailed, UnsupportedModel
from build_artifacts.families import read_metadata
from build_artifacts.families.base import BuildBudget
from build_artifacts.families.decoder import drop_slower_compiled
from build_artifacts.pipeline import BuildRequest, BuildResult, build
from build_artifacts.presets import (
    DECODER_FP16,
    DECODER_FP16_COMPILED,
    DECODER_FP16_TORCH,
    DECODER_INT8,
    DECODER_INT8_BLOCKS,
    SEARCH_PRESETS,
)
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import DECODER_FP32, BuildRecipe, DecoderRecipe
from deployments.artifacts.manifest import (
    CHAT_TEMPLATE_NAME,
    GENERATION_NAME,
    TOOL_TEMPLATE_NAME,
    ArtifactManifest,
    Gate,
    ModelSource,
)
from deployments.artifacts.types import TEXT2TEXT_TASKS, Device, TaskName
from deployments.config import EncoderSettings, GeneratorSettings
from deployments.engines.decoder import DecoderSpec
from deployments.engines.decoder_factory import open_decoder
from deployments.engines.onnx.decoder import MAX_DRAFT_TOKENS, OnnxDecoder
from deployments.errors import DigestMismatch
from hundredfold.__main__ import main as hundredfold
from tests.support.decoder_artifacts import CHATML
from tests.support.decoder_families import OWN, write_decoder
from tests.support.tiny_decoders import (
    make_marian,
    make_t5,
    tiny_gpt2,
    tiny_llama,
    tiny_nemotron,
    tiny_writer,
)

pytestmark = pytest.mark.slow

SOURCE = ModelSource(ref="tiny", revision="0")
T5_TASKS = (TaskName.TEXT2TEXT_GENERATION,)
TOOL_TEMPLATE = "{{ tools | tojson }}"

# LENIENT has low limits, because these tests check the flow of a build and quantized random weights
# are inaccurate. No model passes HOPELESS, which requires half of the original perplexity.
LENIENT = Gate(next_token_agreement=0.5, perplexity_increase=0.5)
HOPELESS = Gate(next_token_agreement=0.5, perplexity_increase=-0.5)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_llama(tmp_path_factory.mktemp("source") / "llama")
    (directory / TOOL_TEMPLATE_NAME).parent.mkdir()
    (directory / TOOL_TEMPLATE_NAME).write_text(TOOL_TEMPLATE, encoding="utf-8")
    return directory


def request_of(source: Path, store: Path, *decoders: DecoderRecipe, gate: Gate) -> BuildRequest:
    recipe = BuildRecipe(candidates=(), decoders=decoders, gate=gate)
    return BuildRequest(
        ref=str(source), store=store, recipe=recipe, budget=BuildBudget(tune_seconds=0.3)
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, source: Path) -> BuildResult:
    store = tmp_path_factory.mktemp("store")
    request = request_of(source, store, DECODER_INT8, DECODER_FP16, gate=LENIENT)
    return build(request, BuildProgress(io.StringIO()))


def test_compiled_candidate_is_sealed_only_if_it_is_the_fastest() -> None:
    int8, torch_, compiled = (
        SimpleNamespace(recipe=recipe)
        for recipe in (DECODER_INT8, DECODER_FP16_TORCH, DECODER_FP16_COMPILED)
    )
    assert drop_slower_compiled([int8, compiled, torch_]) == [int8, compiled, torch_]
    assert drop_slower_compiled([int8, torch_, compiled]) == [int8, torch_]


def test_manifest_contains_generation_config(built: BuildResult) -> None:
    manifest = ArtifactManifest.read(built.directory)
    assert manifest.tasks == (TaskName.TEXT_GENERATION,)
    assert manifest.generation_config is not None
    assert (manifest.generation_config.layers, manifest.generation_config.kv_heads) == (2, 2)
    assert [(c.name, c.kv_cache_dtype) for c in manifest.candidates] == [
        ("cpu-int8", "int8"),
        ("gpu-fp16", None),
    ]
    for candidate in manifest.candidates:
        assert candidate.scores["perplexity"] < manifest.scores["perplexity"] * 1.5
        assert candidate.parity.batched_cosine_worst > 0.9999
    assert (built.directory / CHAT_TEMPLATE_NAME).read_text(encoding="utf-8") == CHATML
    assert (built.directory / TOOL_TEMPLATE_NAME).read_text(encoding="utf-8") == TOOL_TEMPLATE
    names = {CHAT_TEMPLATE_NAME, TOOL_TEMPLATE_NAME, "graphs/cpu-int8/model.onnx.data"}
    assert names <= set(manifest.files)


@pytest.mark.parametrize("name", ["cpu-int8", "gpu-fp16"])
def test_sealed_graphs_open_and_generate(built: BuildResult, name: str) -> None:
    manifest = built.manifest
    (candidate,) = (c for c in manifest.candidates if c.name == name)
    spec = DecoderSpec.of(built.directory, manifest, candidate)
    engine = OnnxDecoder(spec, EncoderSettings(), slots=2, context=32)
    try:
        assert engine.prefill(1, [5, 6, 7], 0).shape == (manifest.output_width,)
        assert engine.prefill(0, [5, 6, 7], 0, all_logits=True).shape == (3, manifest.output_width)
        assert engine.info.max_draft_tokens == (MAX_DRAFT_TOKENS if candidate.kv_cache_dtype else 0)
    finally:
        engine.close()


def test_report_shows_generation_samples(
    built: BuildResult, capsys: pytest.CaptureFixture[str]
) -> None:
    generation = read_generation_report(built.directory)
    assert set(generation.throughput) == {"cpu-int8"}
    assert len(generation.samples) == 8
    for conversation in generation.samples:
        assert conversation.prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
        answer = conversation.candidates["gpu-fp16"]
        expected = conversation.reference
        assert answer.tokens[: answer.matching_tokens] == expected.tokens[: answer.matching_tokens]
    assert generation.matching_token_share("gpu-fp16") > 0.3

    store = str(built.directory.parents[1])
    assert main(["report", built.manifest.id, "--store", store]) == 0
    output = capsys.readouterr().out
    assert "cpu-int8" in output
    assert "perplexity of the reference model" in output
    parity = {candidate.name: candidate.parity for candidate in built.manifest.candidates}
    assert f"{parity['cpu-int8'].batched_cosine_worst:.4f}" in output
    assert main(["report", built.manifest.id, "--store", store, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["parity"]
    assert printed["cpu-int8"]["batched_cosine_worst"] == parity["cpu-int8"].batched_cosine_worst
    assert main(["verify", built.manifest.id, "--store", store]) == 0
    assert "every digest matches" in capsys.readouterr().out
    assert main(["verify", built.manifest.id, "--store", store, "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)
    assert [check["candidate"] for check in checks] == [c.name for c in built.manifest.candidates]
    assert all(check["passed"] is None for check in checks)
    assert "checked by the build" in checks[0]["reasons"][0]
    assert hundredfold(["models", "ls", "--store", store]) == 0
    assert "text-generation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("tune", []),
        ("compact", []),
        ("report", ["--force"]),
        ("report", ["--eval", "data.tsv"]),
        ("report", ["--threads", "1"]),
        ("report", ["--prune-data", "data.tsv"]),
        ("report", ["--runs", "50"]),
        ("report", ["--seconds", "0"]),
        ("report", ["--eval-limit", "9"]),
    ],
)
def test_encoder_commands_reject_decoders(
    built: BuildResult,
    source: Path,
    command: str,
    options: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = str(built.directory.parents[1])
    about = str(source) if command == "compact" else built.manifest.id
    assert main([command, about, "--store", store, *options]) == 1
    error = capsys.readouterr().err.partition("\n")[0]
    name = " ".join([command, *options[:1]])
    assert error.startswith(f"error: `{name}` does not support models that generate text: ")


def test_json_of_report_and_verify(built: BuildResult, capsys: pytest.CaptureFixture[str]) -> None:
    where = [built.manifest.id, "--store", str(built.directory.parents[1]), "--json"]
    assert main(["report", *where]) == 0
    assert set(json.loads(capsys.readouterr().out)["throughput"]) == {"cpu-int8"}
    assert main(["verify", *where]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["passed"] for row in rows] == [None] * len(built.manifest.candidates)
    assert all("checked by the build" in reason for row in rows for reason in row["reasons"])


def test_changed_generation_report_fails_digest(built: BuildResult, tmp_path: Path) -> None:
    copy = shutil.copytree(built.directory, tmp_path / built.directory.name)
    content = json.loads((copy / GENERATION_NAME).read_bytes())
    content["samples"][0]["reference"]["tokens"][0] += 1
    (copy / GENERATION_NAME).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DigestMismatch, match=GENERATION_NAME):
        ArtifactManifest.read(copy)


def test_build_without_accepted_graph_raises_gate_failed(source: Path, tmp_path: Path) -> None:
    output = io.StringIO()
    request = request_of(source, tmp_path, DECODER_INT8, gate=HOPELESS)
    with pytest.raises(GateFailed, match="`LlamaForCausalLM` for the CPU"):
        build(request, BuildProgress(output))
    verified = [line for line in output.getvalue().splitlines() if " gate " in line]
    assert all("rejected, perplexity" in line for line in verified)
    tried = [line.partition(" s  ")[2].partition(" against")[0] for line in verified]
    assert tried == ["cpu-int8, int8 KV cache", "cpu-int8", DECODER_FP32.name]


def test_build_decoder_with_eval_is_rejected(source: Path, tmp_path: Path) -> None:
    request = request_of(source, tmp_path, DECODER_INT8, gate=LENIENT)
    (tmp_path / "data.tsv").write_text("text\tlabel\na\tb\n", encoding="utf-8")
    effort = BuildBudget(tune_seconds=0.3, evaluation=tmp_path / "data.tsv")
    with pytest.raises(BuildError, match="`--eval` is not supported"):
        build(replace(request, budget=effort), BuildProgress(io.StringIO()))


def test_search_without_decoders_is_rejected(source: Path, tmp_path: Path) -> None:
    request = BuildRequest(ref=str(source), store=tmp_path, recipe=SEARCH_PRESETS["dynamic"])
    with pytest.raises(BuildError, match="`--search dynamic` is not supported") as caught:
        build(request, BuildProgress(io.StringIO()))
    assert caught.value.hint == "use `--search quick` or `--search full`"


@pytest.mark.parametrize("limit", ["cosine_mean", "top1_agreement", "metric_drop"])
def test_unused_gate_limit_is_rejected(source: Path, tmp_path: Path, limit: str) -> None:
    gate = LENIENT.model_copy(update={limit: 0.1})
    request = request_of(source, tmp_path, DECODER_INT8, gate=gate)
    with pytest.raises(BuildError, match=f"`--gate {limit}` is not supported") as caught:
        build(request, BuildProgress(io.StringIO()))
    assert (
        "next_token_agreement, perplexity_increase, batched_cosine_worst, near_tie_margin"
        in caught.value.hint
    )


def test_unsupported_rope_type_is_rejected_by_name(tmp_path: Path) -> None:
    source = tiny_nemotron(tmp_path / "nemotron", "linear")
    output = io.StringIO()
    request = request_of(source, tmp_path / "store", DECODER_INT8, gate=LENIENT)
    with pytest.raises(UnsupportedModel, match="rope type is `linear`"):
        build(request, BuildProgress(output))
    skipped = [line for line in output.getvalue().splitlines() if line.split()[0] == "skip"]
    assert [line.split()[3].strip(",:") for line in skipped] == ["cpu-int8", "cpu-fp32"]


def test_unsupported_config_is_refused_before_the_reference(tmp_path: Path) -> None:
    """Building the graph needs no weights, and the reference reads and computes all of them."""
    config = OWN["DeepseekV3ForCausalLM"] | {"n_group": 2}
    write_decoder("DeepseekV3ForCausalLM", tmp_path / "checkpoint", config)
    request = request_of(tmp_path / "checkpoint", tmp_path / "store", DECODER_INT8, gate=LENIENT)
    output = io.StringIO()
    with pytest.raises(UnsupportedModel, match="`n_group` of the architecture"):
        build(request, BuildProgress(output))
    assert "reference" not in output.getvalue()


@pytest.mark.parametrize(("free", "warns"), [(10**5, True), (10**6, False)])
def test_build_tells_if_memory_is_short(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, warns: bool
) -> None:
    monkeypatch.setattr("build_artifacts.workspaces.step_runner.free_bytes", lambda _: free)
    log = io.StringIO()
    build(
        request_of(source, tmp_path / "store", DECODER_INT8_BLOCKS, gate=LENIENT),
        BuildProgress(log),
    )
    before, _, after = log.getvalue().partition("  reference ")
    assert ("GB of memory; 0.0 GB are free" in before) == warns
    assert "are free" not in after
    assert count_parameters(source) == 95_808


def test_decoder_recipes_cover_both_devices() -> None:
    assert DECODER_INT8.device is Device.CPU
    assert DECODER_FP16.device is Device.GPU


@pytest.mark.parametrize("recipe", [DECODER_INT8, DECODER_INT8_BLOCKS], ids=lambda r: r.name)
def test_build_gpt2_uses_graph_builder(recipe: DecoderRecipe, tmp_path: Path) -> None:
    source = tiny_gpt2(tmp_path / "gpt2")
    request = request_of(source, tmp_path / "store", recipe, DECODER_FP16, gate=LENIENT)
    built = build(request, BuildProgress(io.StringIO()))
    assert [candidate.name for candidate in built.manifest.candidates] == [recipe.name]
    (candidate,) = built.manifest.candidates
    assert candidate.kv_cache_dtype == recipe.kv_cache_dtype
    assert candidate.parity.cosine_mean > 0.99
    assert candidate.parity.batched_cosine_worst > 0.9999
    assert built.manifest.architecture == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("make", "own_task"),
    [(make_t5, TaskName.TEXT2TEXT_GENERATION), (make_marian, TaskName.TRANSLATION)],
)
def test_build_encoder_decoder_serves_answers(
    make: Any, own_task: TaskName, tmp_path: Path
) -> None:
    source = tiny_writer(tmp_path / "writer", make)
    request = request_of(source, tmp_path / "store", DECODER_INT8, gate=LENIENT)
    built = build(request, BuildProgress(io.StringIO()))
    manifest = built.manifest
    assert manifest.tasks[0] == own_task
    assert set(manifest.tasks) == set(TEXT2TEXT_TASKS)
    assert manifest.generation_config is not None
    assert manifest.generation_config.encoder_decoder is not None
    (candidate,) = manifest.candidates
    assert candidate.encoder is not None
    assert candidate.kv_cache_dtype is None
    graphs = [file.stat().st_size for file in (built.directory / "graphs").rglob("*.onnx*")]
    assert (len(graphs), manifest.count_bytes(candidate)) == (4, sum(graphs))
    assert candidate.parity.cosine_mean > 0.98
    assert candidate.parity.batched_cosine_worst > 0.9999
    spec = DecoderSpec.of(built.directory, manifest, candidate)
    engine = open_decoder(spec, GeneratorSettings(kv_slots=2))
    try:
        assert engine.prefill(1, [5, 6, 7], 0).shape == (manifest.output_width,)
    finally:
        engine.close()
    report = read_generation_report(built.directory)
    assert all(len(sample.reference.tokens) > 0 for sample in report.samples)


def test_encoder_decoder_defaults_come_from_checkpoint(tmp_path: Path) -> None:
    t5 = read_metadata(Checkpoint(tiny_writer(tmp_path / "t5", make_t5), SOURCE, "x/t5"), T5_TASKS)
    assert t5.generation_config is not None
    assert t5.generation_config.task_prefixes == {"summarization": "summarize: "}, (
        "two languages, no prefix"
    )
    marian = tiny_writer(tmp_path / "marian", make_marian)
    metadata = read_metadata(Checkpoint(marian, SOURCE, "x/marian"), (TaskName.TRANSLATION,))
    assert metadata.generation_config is not None
    assert (
        metadata.generation_config.defaults.num_beams,
        metadata.generation_config.defaults.max_new_tokens,
    ) == (2, 39)
