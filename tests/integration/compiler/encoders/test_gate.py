"""Accuracy gate of encoder candidates: acceptance, fallbacks and rejection."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from build_artifacts.encoders.preparation import PreparedModel
from build_artifacts.errors import UnsupportedModel
from build_artifacts.evaluation import EvaluatedModel, load_evaluation
from build_artifacts.presets import CPU_INT8_DYNAMIC, CPU_INT8_STATIC, CPU_INT8_WEIGHTS
from build_artifacts.recipes import CPU_FP32, CandidateRecipe, StaticInt8
from deployments.artifacts.manifest import Gate
from tests.support.prepared_build import (
    ANYTHING,
    FixedGraphs,
    PreparedBuild,
    RecordingRunner,
    corrupted,
    matrices,
    unreadable,
)

# Rejects int8 of all MatMuls (mean cosine 0.79). Accepts int8 with two MatMuls excluded (0.95).
INT8_WITH_EXCLUSIONS_GATE = Gate(cosine_mean=0.9, cosine_worst=-2, batched_cosine_worst=-2)
# Rejects int8, even with MatMuls excluded.
FP32_GATE = Gate(cosine_mean=0.9999)


@pytest.fixture
def runner(tmp_path: Path) -> RecordingRunner:
    return RecordingRunner(tmp_path / "work")


def test_accurate_candidate_is_accepted_without_fallback(
    prepared_build: PreparedBuild, runner: RecordingRunner
) -> None:
    accepted = prepared_build.accuracy_gate(runner, FP32_GATE).first_accepted(CPU_FP32)
    assert accepted is not None
    assert accepted.parity.cosine_worst > 0.999999
    assert (accepted.excluded_nodes, accepted.result.scores) == ((), {})
    assert accepted.spec.path == prepared_build.graphs.graph(CPU_FP32)
    assert runner.lines("gate") == [
        "cpu-fp32 against fp32 torch: accepted, cosine 1.0000 mean 1.0000 worst, 1.0000 batched"
    ]


def test_fallback_excludes_most_sensitive_matmuls(
    prepared_build: PreparedBuild, runner: RecordingRunner
) -> None:
    accepted = prepared_build.accuracy_gate(runner, INT8_WITH_EXCLUSIONS_GATE).first_accepted(
        CPU_INT8_DYNAMIC
    )
    assert accepted is not None
    assert accepted.recipe == CPU_INT8_DYNAMIC
    assert (
        list(accepted.excluded_nodes) == prepared_build.graphs.sensitive_nodes(CPU_INT8_DYNAMIC)[:2]
    )
    # The first excluded MatMul has the planted activation outlier.
    assert matrices(prepared_build.graphs.float_graph(CPU_INT8_DYNAMIC))[
        accepted.excluded_nodes[0]
    ].shape == (
        64,
        32,
    )
    assert accepted.parity.cosine_mean >= INT8_WITH_EXCLUSIONS_GATE.cosine_mean
    original, fallback = runner.lines("gate")
    assert original.startswith("cpu-int8-dynamic against fp32 torch: rejected, mean cosine 0.7")
    assert fallback.startswith("cpu-int8-dynamic, 2 MatMuls excluded against fp32 torch: accepted")


def test_fallbacks_exclude_at_most_a_quarter_of_matmuls(
    prepared_build: PreparedBuild, runner: RecordingRunner
) -> None:
    assert prepared_build.accuracy_gate(runner, FP32_GATE).first_accepted(CPU_INT8_DYNAMIC) is None
    candidates = [line.partition(" against")[0] for line in runner.lines("gate")]
    # Two of twelve MatMuls are excluded. Four would exceed the limit, a quarter of all MatMuls.
    assert candidates == ["cpu-int8-dynamic", "cpu-int8-dynamic, 2 MatMuls excluded"]


def test_fallbacks_try_calibrations_before_exclusions(
    prepared_build: PreparedBuild, runner: RecordingRunner
) -> None:
    attempts: list[tuple[str, int]] = []

    class RecordingGraphs(FixedGraphs):
        def graph(self, recipe: CandidateRecipe, excluded_nodes: Sequence[str] = ()) -> Path:
            assert isinstance(recipe.quantization, StaticInt8)
            attempts.append((recipe.quantization.calibration, len(excluded_nodes)))
            return super().graph(recipe, excluded_nodes)

    graphs = RecordingGraphs({CPU_INT8_STATIC.name: prepared_build.graphs.graph(CPU_INT8_DYNAMIC)})
    assert (
        prepared_build.accuracy_gate(
            runner, INT8_WITH_EXCLUSIONS_GATE, graphs=graphs
        ).first_accepted(CPU_INT8_STATIC)
        is None
    )
    expected = [("minmax", 0), ("percentile", 0), ("entropy", 0), ("minmax", 2)]
    assert attempts == expected


def test_weight_only_and_float_candidates_have_no_fallbacks(
    prepared_build: PreparedBuild, runner: RecordingRunner
) -> None:
    strict_gate = prepared_build.accuracy_gate(runner, Gate(cosine_mean=1.1))
    for recipe in (CPU_INT8_WEIGHTS, CPU_FP32):
        assert strict_gate.first_accepted(recipe) is None
    assert len(runner.lines("gate")) == 2


def test_candidate_without_allowed_fallbacks_is_evaluated_once(
    prepared_build: PreparedBuild, runner: RecordingRunner
) -> None:
    assert (
        prepared_build.accuracy_gate(runner, INT8_WITH_EXCLUSIONS_GATE).first_accepted(
            CPU_INT8_DYNAMIC, allow_fallbacks=False
        )
        is None
    )
    assert len(runner.lines("gate")) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_outputs_are_rejected(
    prepared_build: PreparedBuild, runner: RecordingRunner, tmp_path: Path, value: float
) -> None:
    graph = corrupted(prepared_build.graphs.graph(CPU_FP32), tmp_path / "graph.onnx", value)
    graphs = FixedGraphs({CPU_FP32.name: graph})
    assert (
        prepared_build.accuracy_gate(runner, ANYTHING, graphs=graphs).first_accepted(CPU_FP32)
        is None
    )
    (line,) = runner.lines("gate")
    assert line.startswith("cpu-fp32 against fp32 torch: rejected, ")
    assert "finite" in line


def test_unreadable_graph_is_rejected(
    prepared_build: PreparedBuild, runner: RecordingRunner, tmp_path: Path
) -> None:
    graphs = FixedGraphs({CPU_FP32.name: unreadable(tmp_path / "graph.onnx")})
    assert (
        prepared_build.accuracy_gate(runner, ANYTHING, graphs=graphs).first_accepted(CPU_FP32)
        is None
    )
    (line,) = runner.lines("gate")
    assert "rejected" in line
    assert "Telepathy" in line


def test_failed_fallback_is_skipped(prepared_build: PreparedBuild, runner: RecordingRunner) -> None:
    class FailingGraphs(FixedGraphs):
        def graph(self, recipe: CandidateRecipe, excluded_nodes: Sequence[str] = ()) -> Path:
            if recipe != CPU_INT8_STATIC:
                raise UnsupportedModel("no range is finite", hint="none")
            return super().graph(recipe, excluded_nodes)

    graphs = FailingGraphs({CPU_INT8_STATIC.name: prepared_build.graphs.graph(CPU_INT8_DYNAMIC)})
    assert (
        prepared_build.accuracy_gate(
            runner, INT8_WITH_EXCLUSIONS_GATE, graphs=graphs
        ).first_accepted(CPU_INT8_STATIC)
        is None
    )
    assert runner.lines("skip") == ["cpu-int8-static: no range is finite"] * 2
    assert graphs.requested == [
        (CPU_INT8_STATIC.name, excluded) for excluded in ((), ("first", "second"))
    ]


def prepare_with_data(prepared_build: PreparedBuild, directory: Path) -> PreparedModel:
    """Return the prepared model with evaluation data that lets its graphs fail the gate.

    The data has two scored pairs, whose order the graphs reverse. The stored score of the
    reference model is perfect, so the metric drops by 200 points.
    """
    directory.mkdir()
    for file in prepared_build.prepared.reference_dir.iterdir():
        shutil.copy(file, directory)
    (directory / "scores.json").write_text('{"spearman": 1.0}', encoding="utf-8")
    pairs = directory / "pairs.tsv"
    pairs.write_text("a good film\ta great film\t1\nthe river\tbad food\t5\n", encoding="utf-8")
    metadata = prepared_build.prepared.metadata
    model = EvaluatedModel(
        directory=prepared_build.prepared.weights, max_tokens=metadata.max_tokens
    )
    evaluation = load_evaluation(pairs, metadata.tasks[0], model)
    return PreparedModel(prepared_build.prepared.weights, metadata, directory, evaluation)


@pytest.mark.parametrize(("limit", "passes"), [(199.0, False), (201.0, True)])
def test_metric_drop_above_limit_is_rejected(
    prepared_build: PreparedBuild,
    runner: RecordingRunner,
    tmp_path: Path,
    limit: float,
    passes: bool,
) -> None:
    prepared = prepare_with_data(prepared_build, tmp_path / "reference")
    gate = ANYTHING.model_copy(update={"metric_drop": limit})
    accepted = prepared_build.accuracy_gate(runner, gate, prepared=prepared).first_accepted(
        CPU_FP32
    )
    (line,) = runner.lines("gate")
    if passes:
        assert accepted is not None
        assert accepted.result.scores == {"spearman": pytest.approx(-1.0)}
        assert line.endswith(", spearman -1.0000")
    else:
        assert accepted is None
        assert line.endswith("rejected, spearman -1.0000, 200.00 points below the reference")


def test_candidate_below_parity_limits_skips_evaluation(
    prepared_build: PreparedBuild, runner: RecordingRunner, tmp_path: Path
) -> None:
    prepared = prepare_with_data(prepared_build, tmp_path / "reference")
    prepared_build.accuracy_gate(runner, FP32_GATE, prepared=prepared).first_accepted(
        CPU_INT8_DYNAMIC, allow_fallbacks=False
    )
    (line,) = runner.lines("gate")
    assert "mean cosine" in line
    assert "spearman" not in line
