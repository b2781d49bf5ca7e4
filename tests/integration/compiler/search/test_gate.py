"""What passes the gate, what is mended until it does, and what never may."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from build_artifacts.errors import UnsupportedModel
from build_artifacts.evaluation import EvaluatedModel, load_evaluation
from build_artifacts.recipes import (
    CPU_FP32,
    CPU_INT8,
    CPU_INT8_STATIC,
    CPU_INT8_WEIGHTS,
    CandidateRecipe,
    StaticInt8,
)
from build_artifacts.search.preparation import PreparedModel
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

# Between int8 as it is (mean cosine 0.79) and with two MatMuls excluded (0.95).
BETWEEN = Gate(cosine_mean=0.9, cosine_worst=-2)
# Further than int8 gets, whatever is kept.
BEYOND = Gate(cosine_mean=0.9999)


@pytest.fixture
def runner(tmp_path: Path) -> RecordingRunner:
    return RecordingRunner(tmp_path / "work")


def test_a_candidate_as_near_as_the_gate_asks_passes_as_it_is(
    workshop: PreparedBuild, runner: RecordingRunner
) -> None:
    passed = workshop.accuracy_gate(runner, BEYOND).first_accepted(CPU_FP32)
    assert passed is not None
    assert passed.parity.cosine_worst > 0.999999
    assert (passed.excluded_nodes, passed.result.scores) == ((), {})
    assert passed.spec.path == workshop.graphs.graph(CPU_FP32)
    assert runner.lines("verify") == [
        "cpu-fp32 against fp32 torch: accepted, cosine 1.0000 mean 1.0000 worst"
    ]


def test_what_fails_is_mended_by_keeping_the_products_that_int8_hurts_most(
    workshop: PreparedBuild, runner: RecordingRunner
) -> None:
    passed = workshop.accuracy_gate(runner, BETWEEN).first_accepted(CPU_INT8)
    assert passed is not None
    assert passed.recipe == CPU_INT8
    assert list(passed.excluded_nodes) == workshop.graphs.sensitive_nodes(CPU_INT8)[:2]
    # The one whose activations have the planted outlier.
    assert matrices(workshop.graphs.float_graph(CPU_INT8))[passed.excluded_nodes[0]].shape == (
        64,
        32,
    )
    assert passed.parity.cosine_mean >= BETWEEN.cosine_mean
    as_it_was, mended = runner.lines("verify")
    assert as_it_was.startswith("cpu-int8 against fp32 torch: rejected, mean cosine 0.7")
    assert mended.startswith("cpu-int8, 2 MatMuls excluded against fp32 torch: accepted")


def test_mending_stops_at_a_quarter_of_the_products(
    workshop: PreparedBuild, runner: RecordingRunner
) -> None:
    assert workshop.accuracy_gate(runner, BEYOND).first_accepted(CPU_INT8) is None
    told = [line.partition(" against")[0] for line in runner.lines("verify")]
    # Two of twelve; four would be a third.
    assert told == ["cpu-int8", "cpu-int8, 2 MatMuls excluded"]


def test_other_calibrations_come_before_any_product_is_kept(
    workshop: PreparedBuild, runner: RecordingRunner
) -> None:
    made: list[tuple[str, int]] = []

    class Watched(FixedGraphs):
        def graph(self, recipe: CandidateRecipe, excluded_nodes: Sequence[str] = ()) -> Path:
            assert isinstance(recipe.quantization, StaticInt8)
            made.append((recipe.quantization.calibration, len(excluded_nodes)))
            return super().graph(recipe, excluded_nodes)

    bad = Watched({CPU_INT8_STATIC.name: workshop.graphs.graph(CPU_INT8)})
    assert (
        workshop.accuracy_gate(runner, BETWEEN, graphs=bad).first_accepted(CPU_INT8_STATIC) is None
    )
    expected = [("minmax", 0), ("percentile", 0), ("entropy", 0), ("minmax", 2)]
    assert made == expected


def test_weights_alone_and_floats_have_nothing_to_mend(
    workshop: PreparedBuild, runner: RecordingRunner
) -> None:
    impossible = workshop.accuracy_gate(runner, Gate(cosine_mean=1.1))
    for recipe in (CPU_INT8_WEIGHTS, CPU_FP32):
        assert impossible.first_accepted(recipe) is None
    assert len(runner.lines("verify")) == 2


def test_a_candidate_is_judged_as_it_is_when_mending_is_not_worth_it(
    workshop: PreparedBuild, runner: RecordingRunner
) -> None:
    assert (
        workshop.accuracy_gate(runner, BETWEEN).first_accepted(CPU_INT8, allow_fallbacks=False)
        is None
    )
    assert len(runner.lines("verify")) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_never_passes(
    workshop: PreparedBuild, runner: RecordingRunner, tmp_path: Path, value: float
) -> None:
    graph = corrupted(workshop.graphs.graph(CPU_FP32), tmp_path / "graph.onnx", value)
    graphs = FixedGraphs({CPU_FP32.name: graph})
    assert workshop.accuracy_gate(runner, ANYTHING, graphs=graphs).first_accepted(CPU_FP32) is None
    (told,) = runner.lines("verify")
    assert told.startswith("cpu-fp32 against fp32 torch: rejected, ")
    assert "finite" in told


def test_a_graph_that_cannot_be_opened_does_not_pass(
    workshop: PreparedBuild, runner: RecordingRunner, tmp_path: Path
) -> None:
    graphs = FixedGraphs({CPU_FP32.name: unreadable(tmp_path / "graph.onnx")})
    assert workshop.accuracy_gate(runner, ANYTHING, graphs=graphs).first_accepted(CPU_FP32) is None
    (told,) = runner.lines("verify")
    assert "rejected" in told
    assert "Telepathy" in told


def test_a_mend_that_cannot_be_made_is_passed_over(
    workshop: PreparedBuild, runner: RecordingRunner
) -> None:
    class Stubborn(FixedGraphs):
        def graph(self, recipe: CandidateRecipe, excluded_nodes: Sequence[str] = ()) -> Path:
            if recipe != CPU_INT8_STATIC:
                raise UnsupportedModel("no range is finite", hint="none")
            return super().graph(recipe, excluded_nodes)

    graphs = Stubborn({CPU_INT8_STATIC.name: workshop.graphs.graph(CPU_INT8)})
    assert (
        workshop.accuracy_gate(runner, BETWEEN, graphs=graphs).first_accepted(CPU_INT8_STATIC)
        is None
    )
    assert runner.lines("skip") == ["cpu-int8-static: no range is finite"] * 2
    assert graphs.asked == [(CPU_INT8_STATIC.name, kept) for kept in ((), ("first", "second"))]


def with_pairs(workshop: PreparedBuild, directory: Path) -> PreparedModel:
    """The model with two scored pairs that its graphs order the wrong way round.

    The original is said to have ordered them rightly.
    """
    directory.mkdir()
    for file in workshop.prepared.reference_dir.iterdir():
        shutil.copy(file, directory)
    (directory / "scores.json").write_text('{"spearman": 1.0}', encoding="utf-8")
    pairs = directory / "pairs.tsv"
    pairs.write_text("a good film\ta great film\t1\nthe river\tbad food\t5\n", encoding="utf-8")
    metadata = workshop.prepared.metadata
    model = EvaluatedModel(directory=workshop.prepared.weights, max_tokens=metadata.max_tokens)
    evaluation = load_evaluation(pairs, metadata.tasks[0], model)
    return PreparedModel(workshop.prepared.weights, metadata, directory, evaluation)


@pytest.mark.parametrize(("limit", "passes"), [(199.0, False), (201.0, True)])
def test_a_drop_of_the_task_s_metric_beyond_the_limit_is_refused(
    workshop: PreparedBuild, runner: RecordingRunner, tmp_path: Path, limit: float, passes: bool
) -> None:
    prepared = with_pairs(workshop, tmp_path / "reference")
    gate = ANYTHING.model_copy(update={"metric_drop": limit})
    passed = workshop.accuracy_gate(runner, gate, prepared=prepared).first_accepted(CPU_FP32)
    (told,) = runner.lines("verify")
    if passes:
        assert passed is not None
        assert passed.result.scores == {"spearman": pytest.approx(-1.0)}
        assert told.endswith(", spearman -1.0000")
    else:
        assert passed is None
        assert told.endswith("rejected, spearman -1.0000, 200.00 points below the reference")


def test_data_is_not_run_through_what_is_too_far_from_the_original_anyway(
    workshop: PreparedBuild, runner: RecordingRunner, tmp_path: Path
) -> None:
    prepared = with_pairs(workshop, tmp_path / "reference")
    workshop.accuracy_gate(runner, BEYOND, prepared=prepared).first_accepted(
        CPU_INT8, allow_fallbacks=False
    )
    (told,) = runner.lines("verify")
    assert "mean cosine" in told
    assert "spearman" not in told
