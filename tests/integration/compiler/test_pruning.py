"""Pruning by importance: order of removal, compensation by retained parts, and whole builds."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_artifacts.__main__ import main
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.compaction.find import find_compaction
from build_artifacts.compaction.layers import encoder_layers
from build_artifacts.compaction.plan import Compaction, LayerReduction
from build_artifacts.encoders.preparation import COMPACTION_NAME
from build_artifacts.errors import BuildError, GateFailed, SourceNotFound, UnsupportedModel
from build_artifacts.families.base import BuildBudget, BuildContext
from build_artifacts.families.decoder import check_options
from build_artifacts.pipeline import BuildRequest, BuildResult, build
from build_artifacts.presets import CPU_INT8, QUICK, SEARCH_PRESETS
from build_artifacts.progress import BuildProgress
from build_artifacts.pruning.importance import measure
from build_artifacts.pruning.prune import Pruning, prune
from build_artifacts.recipes import CPU_FP32, BuildRecipe
from build_artifacts.report.rebuild import rebuild_prepared
from build_artifacts.sources.hub import HuggingFaceHub
from deployments.artifacts.manifest import Gate, PruningSource
from deployments.artifacts.types import TaskName
from deployments.config import EncoderSettings
from deployments.engines import GraphSpec, open_engine
from deployments.messages import TokenizedItem
from deployments.tuning.parity import ReferenceOutputs, cosines, run_probes
from tests.support.in_process import InProcess
from tests.support.prepared_build import ANYTHING, LITTLE, SMALL, RecordingRunner, op_counts
from tests.support.pruned_checkpoints import (
    ATTENTION_HEADS,
    HIDDEN,
    LAYERS,
    POSITIONS,
    ROWS,
    answers,
    channels,
    encoder,
    layer,
    zero_columns,
    zero_rows,
)
from tests.support.tiny_encoders import tiny_tokenizer, write_pooling

TOLERANCE = 1e-5
FITTED_TOLERANCE = 2e-2  # for outputs of magnitude 1; the ridge of the fit changes them
QUARTER = 0.25
COLUMNS = tuple(range(8, 24))  # a quarter of ROWS
RECIPE = BuildRecipe(candidates=(CPU_INT8, CPU_FP32), gate=ANYTHING)
FAMILIES = ("bert", "distilbert", "electra", "roberta")


def describe(model: Any, task: TaskName = TaskName.FEATURE_EXTRACTION) -> CheckpointMetadata:
    return CheckpointMetadata(
        tasks=(task,),
        architecture=model.config.model_type,
        max_tokens=POSITIONS - 2,
        output_width=HIDDEN,
        pooling="mean" if task is TaskName.FEATURE_EXTRACTION else None,
        problem_type="single_label" if task is TaskName.TEXT_CLASSIFICATION else None,
    )


def items(count: int = 24) -> list[TokenizedItem]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 30, size=count).tolist()
    return [TokenizedItem(rng.integers(5, 100, size=n).astype(np.int32), n) for n in lengths]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_parts_without_effect_go_first(model_type: str) -> None:
    model = encoder(model_type)
    for index, head in enumerate((1, 3)):
        zero_columns(layer(model, index).attention_output, channels(head))
        zero_columns(layer(model, index).ffn_down, COLUMNS)
    before = answers(model)
    prune(model, QUARTER, describe(model), items())
    assert find_compaction(model).reductions == (
        LayerReduction(layer=0, heads=(1,), ffn_channels=COLUMNS),
        LayerReduction(layer=1, heads=(3,), ffn_channels=COLUMNS),
    )
    np.testing.assert_allclose(answers(model), before, rtol=0, atol=TOLERANCE)


HEADS = [
    (TaskName.FEATURE_EXTRACTION, "AutoModel"),
    (TaskName.TEXT_CLASSIFICATION, "AutoModelForSequenceClassification"),
    (TaskName.TOKEN_CLASSIFICATION, "AutoModelForTokenClassification"),
    (TaskName.QUESTION_ANSWERING, "AutoModelForQuestionAnswering"),
]


@pytest.mark.parametrize(("task", "kind"), HEADS)
def test_importance_follows_the_effect(task: TaskName, kind: str) -> None:
    model = encoder("bert", kind)
    useless = [(0, 2), (1, 0), (1, 1)]
    for index, head in useless:
        layer(model, index).attention_output.weight.data[:, channels(head)] *= 1e-4
    layer(model, 0).ffn_down.weight.data[:, list(COLUMNS)] *= 1e-4
    before = answers(model)
    statistics = measure(model, encoder_layers(model), describe(model, task), items())
    rated = {
        (index, head): value
        for index, seen in enumerate(statistics)
        for head, value in enumerate(seen.heads.importance.tolist())
    }
    ranked = sorted(rated, key=rated.__getitem__)
    assert set(ranked[:3]) == set(useless)
    assert rated[ranked[3]] > 10 * rated[ranked[2]]
    ffn_channels = statistics[0].ffn_channels.importance
    assert sorted(ffn_channels.argsort()[: len(COLUMNS)].tolist()) == list(COLUMNS)
    assert statistics[0].ffn_channels.moments[-1, -1] == sum(len(item.ids) for item in items())
    np.testing.assert_array_equal(answers(model), before)


def test_equal_items_give_equal_importance() -> None:
    model = encoder("bert")
    first, second = (
        measure(model, encoder_layers(model), describe(model), items()) for _ in range(2)
    )
    assert first[0].heads.importance.tolist() == second[0].heads.importance.tolist()


def test_retained_heads_take_over_what_they_know() -> None:
    model = encoder("bert")
    for index in range(LAYERS):
        at = layer(model, index)
        for linear in (at.query, at.key, at.value):  # head 1 becomes a copy of head 0
            for values in (linear.weight.data, linear.bias.data):
                values[channels(1)] = values[channels(0)]
        at.attention_output.weight.data[:, channels(1)] *= 0.02  # so that pruning removes head 1
        zero_columns(at.ffn_down, COLUMNS)
    without = encoder("bert")
    without.load_state_dict(model.state_dict())
    for index in range(LAYERS):
        zero_columns(layer(without, index).attention_output, channels(1))
    before = answers(model)
    prune(model, QUARTER, describe(model), items())
    assert [reduction.heads for reduction in find_compaction(model).reductions] == [(1,), (1,)]
    lost = np.abs(answers(without) - before).max()
    assert np.abs(answers(model) - before).max() < min(FITTED_TOLERANCE, lost / 3)


def test_constant_heads_move_to_the_bias() -> None:
    model = encoder("bert")
    for index in range(LAYERS):
        at = layer(model, index)
        zero_rows(at.value, channels(2))
        at.attention_output.weight.data[:, channels(2)] *= 0.05
        zero_columns(at.ffn_down, COLUMNS)
    before = answers(model)
    prune(model, QUARTER, describe(model), items())
    assert [reduction.heads for reduction in find_compaction(model).reductions] == [(2,), (2,)]
    np.testing.assert_allclose(answers(model), before, rtol=0, atol=FITTED_TOLERANCE)


def test_every_layer_retains_a_head_and_channels() -> None:
    model = encoder("bert")
    prune(model, 0.99, describe(model), items(4))
    removed = find_compaction(model).reductions
    assert [len(reduction.heads) for reduction in removed] == [ATTENTION_HEADS - 1] * LAYERS
    assert [len(reduction.ffn_channels) for reduction in removed] == [ROWS - 16] * LAYERS


def test_unknown_architecture_is_rejected() -> None:
    model = encoder("albert", embedding_size=16)
    with pytest.raises(UnsupportedModel, match="`albert` cannot be pruned") as caught:
        prune(model, QUARTER, describe(model), items(1))
    assert "bert, camembert" in caught.value.hint


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    tiny_tokenizer(directory)
    write_pooling(directory, normalize=False)
    return directory


def build_pruned(source: Path, store: Path, **changes: Any) -> BuildResult:
    request = {"pruning": Pruning(fraction=0.5), "recipe": RECIPE, "budget": LITTLE} | changes
    return build(
        BuildRequest(ref=str(source), store=store, **request), BuildProgress(io.StringIO())
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = encoder("bert")
    for head in (1, 2, 3):  # so that layer 0 retains fewer heads than layer 1
        layer(model, 0).attention_output.weight.data[:, channels(head)] *= 1e-3
    return save(model, tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    return build_pruned(source, tmp_path_factory.mktemp("store"))


def test_artifact_tells_the_heads_of_each_layer(built: BuildResult) -> None:
    manifest = built.manifest
    assert manifest.source.pruning == PruningSource(fraction=0.5)
    assert manifest.pruned is not None
    assert manifest.pruned.startswith("removed 4 of 8 heads and 64 of 128 feed-forward channels: ")
    sealed = Compaction.model_validate_json((built.directory / COMPACTION_NAME).read_bytes())
    assert [len(reduction.heads) for reduction in sealed.reductions] == [3, 1]
    assert COMPACTION_NAME in manifest.files


def test_graphs_are_smaller_and_exact(built: BuildResult, source: Path, tmp_path: Path) -> None:
    whole = build_pruned(source, tmp_path, pruning=None)
    assert whole.manifest.version != built.manifest.version
    assert whole.manifest.pruned is None
    reference = ReferenceOutputs.read(built.directory / "reference.npz")
    # Manifests list the fastest candidate first, and the order may differ between measurements.
    unpruned = {candidate.name: candidate for candidate in whole.manifest.candidates}
    assert unpruned.keys() == {candidate.name for candidate in built.manifest.candidates}
    for small in built.manifest.candidates:
        large = unpruned[small.name]
        saved = whole.manifest.count_bytes(large) - built.manifest.count_bytes(small)
        gone = 4 * (4 * 8 * HIDDEN) + 64 * 2 * HIDDEN  # removed weights of heads and channels
        assert saved > 0.8 * gone * (4 if small.precision == "fp32" else 1)
        operators = op_counts(built.directory / small.graph)
        # The rewrite `packed-heads` applies to every layer, even to the layer with one head.
        assert operators["Attention"] == LAYERS
        assert not operators["Reshape"]
        engine = open_engine(
            GraphSpec.of(built.directory, built.manifest, small), EncoderSettings()
        )
        outputs = run_probes(engine, reference.items, 1)
        engine.close()
        least = 0.99999 if small.precision == "fp32" else 0.98
        assert cosines(outputs, reference.outputs).min() > least


async def test_server_answers_like_the_pruned_model(built: BuildResult) -> None:
    manifest = built.manifest
    texts = ["good", "the lovely river and the city at night"]
    async with InProcess(built.directory.parents[1], models=(manifest.id,)).client() as http:
        reply = await http.post(f"/models/{manifest.id}", json={"inputs": texts})
    assert reply.status_code == 200
    assert np.array(reply.json()).shape == (2, HIDDEN)
    assert np.isfinite(reply.json()).all()


def test_report_prunes_again(built: BuildResult, tmp_path: Path) -> None:
    steps = RecordingRunner(tmp_path / "work").steps
    prepared = rebuild_prepared(built.manifest, steps, HuggingFaceHub())
    sealed = (built.directory / COMPACTION_NAME).read_text(encoding="utf-8")
    assert prepared.compaction == Compaction.model_validate_json(sealed)
    assert prepared.original is not None
    assert prepared.original.compaction.is_empty
    data = tmp_path / "other.tsv"
    data.write_text("1\tgood\tbad\n", encoding="utf-8")
    with pytest.raises(SourceNotFound, match="not those of the build"):
        rebuild_prepared(built.manifest, steps, HuggingFaceHub(), prune_data=data)


def test_gate_rejects_what_costs_too_much(source: Path, tmp_path: Path) -> None:
    with pytest.raises(GateFailed, match="without 50% of its heads and feed-forward") as caught:
        build_pruned(source, tmp_path, recipe=replace(RECIPE, gate=Gate(cosine_mean=0.99999)))
    assert "--gate metric_drop=POINTS" in caught.value.hint


def test_metric_decides_with_data(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SEARCH_PRESETS, "quick", SMALL)
    data = tmp_path / "pairs.tsv"
    data.write_text("score\tsentence1\tsentence2\n1\tgood\tbad\n2\tthe river\ta train\n"
                    "3\tgood\tlovely film\n", encoding="utf-8")  # fmt: skip
    options = ["--store", str(tmp_path / "store"), "--tune-seconds", "0", "--search", "quick"]
    command = ["build", str(source), "--prune", "0.5", "--prune-data", str(data), *options]
    assert main([*command, "--eval", str(data), "--gate", "metric_drop=-100"]) == 1
    loose = ("cosine_mean=-1", "cosine_worst=-1", "metric_drop=500")
    assert main([*command, "--eval", str(data), *(w for g in loose for w in ("--gate", g))]) == 0


@pytest.mark.parametrize("fraction", ["0", "1", "nan", "half"])
def test_invalid_fraction_is_rejected(fraction: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["build", "somewhere", "--prune", fraction])
    assert "is not a number between 0 and 1" in capsys.readouterr().err


def test_data_without_pruning_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "somewhere", "--prune-data", "texts.tsv"]) == 1
    assert "error: `--prune-data` has no effect without `--prune`" in capsys.readouterr().err


def test_generative_models_are_not_pruned() -> None:
    context = BuildContext(
        steps=None,
        weights=Path("unused"),
        metadata=None,
        recipe=QUICK,
        budget=BuildBudget(),
        pruning=Pruning(fraction=QUARTER),
    )
    with pytest.raises(BuildError, match="`--prune` is not supported for models that generate"):
        check_options(context)
