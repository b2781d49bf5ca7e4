"""Candidate search: order of evaluation, skipped candidates and reuse."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from build_artifacts import accuracy_gate
from build_artifacts.accuracy_gate import AccuracyGate, CandidateSearch
from build_artifacts.build_devices import has_device
from build_artifacts.encoders.candidates import CandidateGraphs
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families.encoder import EncoderCandidate
from build_artifacts.presets import CPU_INT8_DYNAMIC, OPENVINO_INT8
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import CPU_FP32, BuildRecipe, CandidateRecipe
from build_artifacts.steps.seal import ArtifactIdentity
from build_artifacts.workspaces.opening import open_build_workspace
from build_artifacts.workspaces.step_runner import StepRunner
from deployments.artifacts.manifest import EngineOptions, Gate, ModelSource
from deployments.artifacts.types import Device
from deployments.engines import GraphSpec
from deployments.host.machine import usable_cores
from deployments.tuning.host import read_host
from tests.support.prepared_build import (
    ANYTHING,
    FixedGraphs,
    PreparedBuild,
    RecordingRunner,
    corrupted,
    set_available_memory,
    slowed,
    unreadable,
)

IDENTITY = ArtifactIdentity("tiny/model", "0" * 12, ModelSource(ref="x", revision="1"), "abc")
# Recipes that differ only in name. The tests provide their graphs.
FAST, SLOW, SLOWER, BROKEN = (
    replace(CPU_FP32, name=name) for name in ("fast", "slow", "slower", "broken")
)


@pytest.fixture
def runner(tmp_path: Path) -> RecordingRunner:
    return RecordingRunner(tmp_path / "work")


@pytest.fixture(scope="module")
def files(
    prepared_build: PreparedBuild, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Path]:
    """Graphs by name.

    `fast`, `slow` and `slower` have equal outputs. `slow` exceeds the slowdown limit of the search
    relative to `fast`, and `slower` relative to `slow`. `broken` and `unknown` are
    unreadable, and `nan` outputs NaN.
    """
    root = tmp_path_factory.mktemp("graphs")
    fast = prepared_build.graphs.graph(CPU_FP32)
    return {
        "fast": fast,
        "slow": slowed(fast, root / "slow.onnx", size=400),
        "slower": slowed(fast, root / "slower.onnx", size=800),
        "broken": unreadable(root / "broken.onnx"),
        "unknown": unreadable(root / "unknown.onnx", "Psychometry"),
        "nan": corrupted(fast, root / "nan.onnx", float("nan")),
    }


class LenientGate(AccuracyGate[CandidateRecipe, GraphSpec]):
    """Gate that evaluates FAST for every candidate and records whether fallbacks are allowed."""

    fallbacks: list[bool]

    def first_accepted(
        self, recipe: CandidateRecipe, *, allow_fallbacks: bool = True
    ) -> EncoderCandidate | None:
        self.fallbacks.append(allow_fallbacks)
        accepted = super().first_accepted(FAST)
        return None if accepted is None else replace(accepted, recipe=recipe)


def search(
    prepared_build: PreparedBuild,
    runner: RecordingRunner,
    graphs: CandidateGraphs,
    *candidates: CandidateRecipe,
    gate: Gate = ANYTHING,
    keep: int = 3,
) -> CandidateSearch[CandidateRecipe, GraphSpec]:
    recipe = BuildRecipe(candidates=candidates, gate=gate, keep=keep)
    build = prepared_build.encoder_build(runner, recipe, graphs=graphs)
    return CandidateSearch(runner.steps, build, AccuracyGate(runner.steps, build), keep, 60.0)


def test_search_evaluates_fastest_and_skips_slow_candidates(
    prepared_build: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    candidate_search = search(prepared_build, runner, FixedGraphs(files), SLOWER, SLOW, FAST)
    accepted = candidate_search.select_for(Device.CPU)
    assert [graph.recipe for graph in accepted] == [FAST]
    (line,) = runner.lines("screen")
    order = [part.split()[0] for part in line.removeprefix("3 graphs: ").split(", ")]
    assert order == ["fast", "slow", "slower"]
    assert len(runner.lines("gate")) == 1


def test_search_evaluates_slower_candidate_after_rejection(
    prepared_build: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    graph_files = {**files, "fast": files["nan"]}
    candidate_search = search(prepared_build, runner, FixedGraphs(graph_files), SLOWER, SLOW, FAST)
    assert [graph.recipe for graph in candidate_search.select_for(Device.CPU)] == [SLOW]
    assert [line.split()[0] for line in runner.lines("gate")] == ["fast", "slow"]


def test_search_skips_unreadable_graph(
    prepared_build: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    candidate_search = search(prepared_build, runner, FixedGraphs(files), BROKEN, FAST)
    assert [graph.recipe for graph in candidate_search.select_for(Device.CPU)] == [FAST]
    assert [line.split()[0] for line in runner.lines("gate")] == ["fast"]


def test_search_with_unreadable_graphs_is_empty(
    prepared_build: PreparedBuild,
    runner: RecordingRunner,
    files: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    other = replace(BROKEN, name="other", options=EngineOptions())
    graphs = FixedGraphs({"broken": files["broken"], "other": unreadable(tmp_path / "graph.onnx")})
    assert search(prepared_build, runner, graphs, BROKEN, other).select_for(Device.CPU) == []
    assert runner.lines("gate") == []


@pytest.fixture
def no_gpu() -> None:
    if has_device(Device.GPU):
        pytest.skip("there is a GPU here")


def as_gpu(*candidates: CandidateRecipe) -> list[CandidateRecipe]:
    """Return the candidates for the GPU. Without a GPU, a search keeps their order."""
    return [replace(recipe, device=Device.GPU) for recipe in candidates]


@pytest.mark.usefixtures("no_gpu")
def test_missing_device_uses_first_accepted_candidate(
    prepared_build: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    graph_files = {**files, "first": files["nan"]}
    order = as_gpu(replace(FAST, name="first"), SLOW, FAST)
    accepted = search(prepared_build, runner, FixedGraphs(graph_files), *order).select_for(
        Device.GPU
    )
    assert [graph.recipe for graph in accepted] == order[1:2]
    assert runner.lines("screen") == []
    assert [line.split()[0] for line in runner.lines("gate")] == ["first", "slow"]


@pytest.fixture
def simulated_gpu(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the search rank and evaluate GPU candidates, which run on the CPU."""
    monkeypatch.setattr(accuracy_gate, "has_device", lambda device: True)


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize(
    ("names", "gate", "warned"),
    [
        (["broken"], ANYTHING, ["broken"]),  # a single graph is not screened
        (["broken", "unknown"], ANYTHING, ["broken", "unknown"]),
        (["broken", "fast"], Gate(cosine_mean=2), ["broken"]),
        (["slow", "fast"], Gate(cosine_mean=2), []),
        (["broken", "fast"], ANYTHING, []),
    ],
)
def test_search_warns_if_failures_leave_the_gpu_without_a_graph(
    prepared_build: PreparedBuild,
    runner: RecordingRunner,
    files: Mapping[str, Path],
    names: list[str],
    gate: Gate,
    warned: list[str],
) -> None:
    recipes = as_gpu(*(replace(FAST, name=name) for name in names))
    candidate_search = search(prepared_build, runner, FixedGraphs(files), *recipes, gate=gate)
    accepted = candidate_search.select_for(Device.GPU)
    assert bool(accepted) == ("fast" in names and gate == ANYTHING)
    lines = [line for line in runner.output.getvalue().splitlines() if line.startswith("warning")]
    assert len(lines) == bool(warned)
    for line in lines:
        assert line.startswith("warning: the model gets no graph for the GPU")
        assert [name for name in names if f"{name}: " in line] == warned


def test_search_without_memory_for_screening_keeps_the_order(
    prepared_build: PreparedBuild,
    runner: RecordingRunner,
    files: Mapping[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_available_memory(monkeypatch, 100)
    candidate_search = search(prepared_build, runner, FixedGraphs(files), SLOW, FAST)
    accepted = candidate_search.select_for(Device.CPU)
    assert [graph.recipe for graph in accepted] == [SLOW, FAST]
    reason = "not enough memory to measure the first graph: 0 MB are free"
    assert runner.lines("skip") == [f"ranking by speed for cpu: {reason}"]

    contents = candidate_search.build.package(accepted, IDENTITY)
    assert contents.cost_tables == ()
    assert [candidate.name for candidate in contents.candidates] == ["slow", "fast"]
    assert set(runner.lines("skip")[1:]) == {f"cost table for cpu: {reason}"}


def test_search_evaluates_at_most_keep_candidates(
    prepared_build: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    # `twin` is no duplicate, because its options differ. It is no slower, as its file is the same.
    duplicate = replace(FAST, name="twin", options=EngineOptions(spinning=True))
    graph_files = FixedGraphs({**files, "twin": files["fast"]})
    accepted = search(prepared_build, runner, graph_files, FAST, duplicate, keep=1).select_for(
        Device.CPU
    )
    assert len(accepted) == len(runner.lines("gate")) == 1


@pytest.mark.usefixtures("no_gpu")
def test_fallbacks_are_tried_before_an_accepted_candidate(
    prepared_build: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    graphs = FixedGraphs(
        {**files, CPU_INT8_DYNAMIC.name: prepared_build.graphs.graph(CPU_INT8_DYNAMIC)}
    )
    gate = Gate(cosine_mean=0.9999)  # above the accuracy of int8
    candidate_search = search(
        prepared_build, runner, graphs, *as_gpu(CPU_INT8_DYNAMIC, FAST), gate=gate
    )
    assert [graph.recipe.name for graph in candidate_search.select_for(Device.GPU)] == ["fast"]
    assert len(runner.lines("gate")) == 3


def test_fallbacks_are_not_allowed_after_an_accepted_candidate(
    prepared_build: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    duplicate = replace(FAST, name="twin", options=EngineOptions(spinning=True))
    graph_files = FixedGraphs({**files, "twin": files["fast"]})
    recipe = BuildRecipe(candidates=(FAST, duplicate), gate=ANYTHING)
    build = prepared_build.encoder_build(runner, recipe, graphs=graph_files)
    gate = LenientGate(runner.steps, build)
    gate.fallbacks = []
    CandidateSearch(runner.steps, build, gate, 3, 60.0).select_for(Device.CPU)
    assert gate.fallbacks == [True, False]


def test_missing_engine_is_skipped_with_reason(
    prepared_build: PreparedBuild,
    runner: RecordingRunner,
    files: Mapping[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    graphs = FixedGraphs(files)
    candidate_search = search(prepared_build, runner, graphs, OPENVINO_INT8, FAST)
    assert [graph.recipe for graph in candidate_search.select_for(Device.CPU)] == [FAST]
    assert runner.lines("skip") == ["openvino-int8: the package `openvino` is not installed"]
    assert {name for name, _ in graphs.requested} == {"fast"}, "a graph without an engine was built"
    assert runner.lines("screen") == [], "a single graph was screened"


def test_failed_candidate_is_skipped_with_reason(
    prepared_build: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    class PartialGraphs(FixedGraphs):
        def graph(self, recipe: CandidateRecipe, excluded_nodes: Sequence[str] = ()) -> Path:
            if recipe == SLOW:
                raise UnsupportedModel("no kernel for it", hint="none")
            return super().graph(recipe, excluded_nodes)

    candidate_search = search(prepared_build, runner, PartialGraphs(files), SLOW, FAST)
    assert [graph.recipe for graph in candidate_search.select_for(Device.CPU)] == [FAST]
    assert runner.lines("skip") == ["slow: no kernel for it"]


def test_search_skips_duplicate_graphs(
    prepared_build: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    duplicate = replace(FAST, name="twin")
    spinning = replace(FAST, name="spinning", options=FAST.options.model_copy(
        update={"spinning": True}
    ))  # fmt: skip
    graph_files = {name: files["fast"] for name in ("fast", "twin", "spinning")}
    search(prepared_build, runner, FixedGraphs(graph_files), FAST, duplicate, spinning).select_for(
        Device.CPU
    )
    assert runner.lines("skip") == ["twin: the same graph as fast"]
    (line,) = runner.lines("screen")
    assert line.startswith("2 graphs: ")


def test_resumed_search_reuses_screening(
    prepared_build: PreparedBuild,
    runner: RecordingRunner,
    files: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    first = search(prepared_build, runner, FixedGraphs(files), SLOW, FAST).select_for(Device.CPU)
    resumed_runner = RecordingRunner(tmp_path / "again")
    (tmp_path / "again" / "steps").symlink_to(tmp_path / "work" / "steps")
    second = search(prepared_build, resumed_runner, FixedGraphs(files), SLOW, FAST).select_for(
        Device.CPU
    )
    assert first == second
    assert resumed_runner.output.getvalue().count("done by an interrupted build") == 2


@pytest.mark.parametrize("others", [(), (SLOW,)], ids=["alone", "screened"])
def test_resumed_search_measures_failed_graphs_again(
    prepared_build: PreparedBuild,
    files: Mapping[str, Path],
    tmp_path: Path,
    others: tuple[CandidateRecipe, ...],
) -> None:
    """The engine may have failed because other processes had the memory of the GPU."""
    accepted = []
    for graph in ("broken", "fast"):
        runner = RecordingRunner(tmp_path / graph)
        progress = BuildProgress(runner.output)
        with (
            suppress(KeyboardInterrupt),
            open_build_workspace(
                tmp_path / "store", "org/model", "0123456789ab", progress
            ) as place,
        ):
            runner.steps = StepRunner(place, progress)
            graphs = FixedGraphs({**files, "broken": files[graph]})
            selected = search(prepared_build, runner, graphs, BROKEN, *others, keep=1)
            accepted.append([each.recipe for each in selected.select_for(Device.CPU)])
            raise KeyboardInterrupt
    assert accepted == [list(others), [BROKEN]]


def test_cost_tables_cover_the_accepted_graphs(
    prepared_build: PreparedBuild, runner: RecordingRunner, files: Mapping[str, Path]
) -> None:
    candidate_search = search(prepared_build, runner, FixedGraphs(files), FAST)
    accepted = candidate_search.select_for(Device.CPU)
    tables = candidate_search.build.package(accepted, IDENTITY).cost_tables
    assert {table.threads for table in tables} == {1, usable_cores()}
    for table in tables:
        assert {row.variant.candidate for row in table.rows} == {"fast"}
        assert table.version == IDENTITY.version
        assert table.host == read_host(Device.CPU)
        tokens = {shape.tokens for shape, _ in table.selection}
        assert tokens <= {16, 64}, "the model reads 64 tokens"
