"""The fastest candidates that pass are found with as little work as possible."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from build_artifacts.accuracy_gate import AccuracyGate, CandidateSearch
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families.encoder import EncoderCandidate
from build_artifacts.recipes import CPU_FP32, CPU_INT8, OPENVINO_INT8, BuildRecipe, CandidateRecipe
from build_artifacts.search.graphs import CandidateGraphs
from build_artifacts.search.screening_settings import has_device
from deployments.artifacts.manifest import EngineOptions, Gate
from deployments.artifacts.types import Device
from deployments.engines import GraphSpec
from deployments.tuning.host import read_host
from tests.support.prepared_build import (
    ANYTHING,
    FixedGraphs,
    PreparedBuild,
    RecordingRunner,
    corrupted,
    slowed,
    unreadable,
)

# One graph under many names; what they are made from is looked at elsewhere.
FAST, SLOW, SLOWER, BROKEN = (
    replace(CPU_FP32, name=name) for name in ("fast", "slow", "slower", "broken")
)


@pytest.fixture
def runner(tmp_path: Path) -> RecordingRunner:
    return RecordingRunner(tmp_path / "work")


@pytest.fixture(scope="module")
def files(workshop: PreparedBuild, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Graphs that answer alike; each slower than the one before by far more than the limit."""
    root = tmp_path_factory.mktemp("graphs")
    fast = workshop.graphs.graph(CPU_FP32)
    return {
        "fast": fast,
        "slow": slowed(fast, root / "slow.onnx", size=400),
        "slower": slowed(fast, root / "slower.onnx", size=800),
        "broken": unreadable(root / "broken.onnx"),
        "nan": corrupted(fast, root / "nan.onnx", float("nan")),
    }


class LenientGate(AccuracyGate[CandidateRecipe, GraphSpec]):
    """Records whether fallbacks are allowed and accepts every candidate as FAST."""

    fallbacks: list[bool]

    def first_accepted(
        self, recipe: CandidateRecipe, *, allow_fallbacks: bool = True
    ) -> EncoderCandidate | None:
        self.fallbacks.append(allow_fallbacks)
        accepted = super().first_accepted(FAST)
        return None if accepted is None else replace(accepted, recipe=recipe)


def search(
    workshop: PreparedBuild,
    runner: RecordingRunner,
    graphs: CandidateGraphs,
    *candidates: CandidateRecipe,
    gate: Gate = ANYTHING,
    keep: int = 3,
) -> CandidateSearch[CandidateRecipe, GraphSpec]:
    recipe = BuildRecipe(candidates=candidates, gate=gate, keep=keep)
    build = workshop.encoder_build(runner, recipe, graphs=graphs)
    return CandidateSearch(runner.steps, build, AccuracyGate(runner.steps, build), keep, 60.0)


def test_the_fastest_comes_first_and_what_is_far_behind_is_not_judged(
    workshop: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    look = search(workshop, runner, FixedGraphs(files), SLOWER, SLOW, FAST)
    passed = look.select_for(Device.CPU)
    assert [graph.recipe for graph in passed] == [FAST]
    (told,) = runner.lines("screen")
    order = [part.split()[0] for part in told.removeprefix("3 graphs: ").split(", ")]
    assert order == ["fast", "slow", "slower"]
    assert len(runner.lines("verify")) == 1


def test_what_is_slower_is_judged_when_nothing_faster_passes(
    workshop: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    given = {**files, "fast": files["nan"]}
    look = search(workshop, runner, FixedGraphs(given), SLOWER, SLOW, FAST)
    assert [graph.recipe for graph in look.select_for(Device.CPU)] == [SLOW]
    assert [line.split()[0] for line in runner.lines("verify")] == ["fast", "slow"]


def test_what_cannot_be_opened_is_left_out_and_not_judged(
    workshop: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    look = search(workshop, runner, FixedGraphs(files), BROKEN, FAST)
    assert [graph.recipe for graph in look.select_for(Device.CPU)] == [FAST]
    assert [line.split()[0] for line in runner.lines("verify")] == ["fast"]


def test_where_nothing_can_be_opened_nothing_is_found(
    workshop: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path], tmp_path: Path
) -> None:
    other = replace(BROKEN, name="other", options=EngineOptions())
    graphs = FixedGraphs({"broken": files["broken"], "other": unreadable(tmp_path / "graph.onnx")})
    assert search(workshop, runner, graphs, BROKEN, other).select_for(Device.CPU) == []
    assert runner.lines("verify") == []


@pytest.fixture
def no_gpu() -> None:
    if has_device(Device.GPU):
        pytest.skip("there is a GPU here")


def for_gpu(*candidates: CandidateRecipe) -> list[CandidateRecipe]:
    """Candidates that are judged in this order on a machine without a GPU."""
    return [replace(recipe, device=Device.GPU) for recipe in candidates]


@pytest.mark.usefixtures("no_gpu")
def test_a_missing_device_gets_the_first_of_the_recipe_that_passes(
    workshop: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    given = {**files, "first": files["nan"]}
    order = for_gpu(replace(FAST, name="first"), SLOW, FAST)
    passed = search(workshop, runner, FixedGraphs(given), *order).select_for(Device.GPU)
    assert [graph.recipe for graph in passed] == order[1:2]
    assert runner.lines("screen") == []
    assert [line.split()[0] for line in runner.lines("verify")] == ["first", "slow"]


def test_no_more_than_the_recipe_keeps_are_judged(
    workshop: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    # The same file under another option, so that neither is a twin nor far behind.
    twin = replace(FAST, name="twin", options=EngineOptions(arena=True))
    given = FixedGraphs({**files, "twin": files["fast"]})
    passed = search(workshop, runner, given, FAST, twin, keep=1).select_for(Device.CPU)
    assert len(passed) == len(runner.lines("verify")) == 1


@pytest.mark.usefixtures("no_gpu")
def test_a_candidate_is_mended_while_nothing_has_passed(
    workshop: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    graphs = FixedGraphs({**files, CPU_INT8.name: workshop.graphs.graph(CPU_INT8)})
    gate = Gate(cosine_mean=0.9999)  # further than int8 gets
    ahead = search(workshop, runner, graphs, *for_gpu(CPU_INT8, FAST), gate=gate)
    assert [graph.recipe.name for graph in ahead.select_for(Device.GPU)] == ["fast"]
    assert len(runner.lines("verify")) == 3


def test_fallbacks_are_not_allowed_after_an_accepted_candidate(
    workshop: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    twin = replace(FAST, name="twin", options=EngineOptions(arena=True))
    given = FixedGraphs({**files, "twin": files["fast"]})
    recipe = BuildRecipe(candidates=(FAST, twin), gate=ANYTHING)
    build = workshop.encoder_build(runner, recipe, graphs=given)
    gate = LenientGate(runner.steps, build)
    gate.fallbacks = []
    CandidateSearch(runner.steps, build, gate, 3, 60.0).select_for(Device.CPU)
    assert gate.fallbacks == [True, False]


def test_an_engine_that_is_not_installed_is_skipped_with_a_line(
    workshop: PreparedBuild,
    runner: RecordingRunner,
    files: Mapping[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    graphs = FixedGraphs(files)
    look = search(workshop, runner, graphs, OPENVINO_INT8, FAST)
    assert [graph.recipe for graph in look.select_for(Device.CPU)] == [FAST]
    assert runner.lines("skip") == ["openvino-int8: the package `openvino` is not installed"]
    assert {name for name, _ in graphs.asked} == {"fast"}, "a graph nobody can run was made"
    assert runner.lines("screen") == [], "a contest of one"


def test_a_candidate_that_cannot_be_made_is_skipped_with_its_reason(
    workshop: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    class Partial(FixedGraphs):
        def graph(self, recipe: CandidateRecipe, excluded_nodes: Sequence[str] = ()) -> Path:
            if recipe == SLOW:
                raise UnsupportedModel("no kernel for it", hint="none")
            return super().graph(recipe, excluded_nodes)

    look = search(workshop, runner, Partial(files), SLOW, FAST)
    assert [graph.recipe for graph in look.select_for(Device.CPU)] == [FAST]
    assert runner.lines("skip") == ["slow: no kernel for it"]


def test_candidates_with_one_graph_and_one_engine_are_one(
    workshop: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    twin = replace(FAST, name="twin")
    spinning = replace(FAST, name="spinning", options=FAST.options.model_copy(
        update={"spinning": True}
    ))  # fmt: skip
    given = {name: files["fast"] for name in ("fast", "twin", "spinning")}
    search(workshop, runner, FixedGraphs(given), FAST, twin, spinning).select_for(Device.CPU)
    assert runner.lines("skip") == ["twin: the same graph as fast"]
    (told,) = runner.lines("screen")
    assert told.startswith("2 graphs: ")


def test_what_a_trial_found_is_not_measured_again(
    workshop: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path], tmp_path: Path
) -> None:
    first = search(workshop, runner, FixedGraphs(files), SLOW, FAST).select_for(Device.CPU)
    again = RecordingRunner(tmp_path / "again")
    (tmp_path / "again" / "steps").symlink_to(tmp_path / "work" / "steps")
    second = search(workshop, again, FixedGraphs(files), SLOW, FAST).select_for(Device.CPU)
    assert first == second
    assert again.told.getvalue().count("done by an interrupted build") == 2


def test_cost_table_covers_the_accepted_graphs(
    workshop: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    look = search(workshop, runner, FixedGraphs(files), FAST)
    build = workshop.encoder_build(runner, BuildRecipe(candidates=(FAST,)))
    accepted = look.select_for(Device.CPU)
    table = build.tune(accepted, "0123456789ab", threads=1, seconds=0.1)
    assert {row.variant.candidate for row in table.rows} == {"fast"}
    assert (table.version, table.threads) == ("0123456789ab", 1)
    assert table.host == read_host(Device.CPU)
    tokens = {shape.tokens for shape, _ in table.selection}
    assert tokens <= {16, 64}, "the model reads 64 tokens"
