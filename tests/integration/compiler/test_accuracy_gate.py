"""Time limit of the search among decoder candidates, which have no speed screening."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from build_artifacts import accuracy_gate
from build_artifacts.accuracy_gate import CandidateSearch
from build_artifacts.families.decoder import DecoderBuild
from build_artifacts.presets import FULL
from build_artifacts.recipes import DecoderRecipe
from deployments.artifacts.types import Device
from tests.support.prepared_build import RecordingRunner

CPU_RECIPES = [recipe for recipe in FULL.decoders if recipe.device is Device.CPU]


class Candidates:
    """Fake decoder build that only lists and ranks candidates."""

    context = SimpleNamespace(
        recipe=FULL,
        metadata=SimpleNamespace(required_generation_config=SimpleNamespace(state_values=0)),
    )
    candidates = DecoderBuild.candidates
    rank = DecoderBuild.rank


class Accepted:
    def __init__(self, recipe: DecoderRecipe) -> None:
        self.recipe = recipe


class SlowGate:
    """Gate that takes 10 ms per candidate and accepts all except `rejected`."""

    def __init__(self, *rejected: DecoderRecipe) -> None:
        self.rejected = rejected
        self.evaluated: list[DecoderRecipe] = []

    def first_accepted(
        self, recipe: DecoderRecipe, *, allow_fallbacks: bool = True
    ) -> Accepted | None:
        time.sleep(0.01)
        self.evaluated.append(recipe)
        return None if recipe in self.rejected else Accepted(recipe)


@pytest.fixture
def runner(tmp_path: Path) -> RecordingRunner:
    return RecordingRunner(tmp_path / "building")


def select(
    runner: RecordingRunner, gate: Any, seconds: float, device: Device = Device.CPU
) -> list[DecoderRecipe]:
    build: Any = Candidates()
    search = CandidateSearch[Any, Any](runner.steps, build, gate, FULL.keep, seconds)
    return [candidate.recipe for candidate in search.select_for(device)]


def test_search_evaluates_all_candidates_within_the_time(runner: RecordingRunner) -> None:
    assert len(CPU_RECIPES) == FULL.keep
    assert select(runner, SlowGate(), 60) == CPU_RECIPES
    assert runner.lines("skip") == []


def test_search_starts_no_candidate_after_the_time(runner: RecordingRunner) -> None:
    gate = SlowGate()
    assert select(runner, gate, 0.005) == gate.evaluated == CPU_RECIPES[:1]
    skipped = [f"{recipe.name}: the search time of 0 s is over" for recipe in CPU_RECIPES[1:]]
    assert runner.lines("skip") == skipped


def test_search_continues_until_a_candidate_is_accepted(runner: RecordingRunner) -> None:
    gate = SlowGate(CPU_RECIPES[0])
    assert select(runner, gate, 0.005) == CPU_RECIPES[1:2]
    assert gate.evaluated == CPU_RECIPES[:2]


def test_each_device_has_its_own_search_time(
    runner: RecordingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy_gate, "has_device", lambda device: True)
    gate = SlowGate()
    selected = [*select(runner, gate, 0.005), *select(runner, gate, 0.005, Device.GPU)]
    assert [recipe.name for recipe in selected] == ["cpu-int8", "gpu-fp16"]


@pytest.mark.parametrize(
    ("is_here", "rejected", "expected"),
    [
        (True, (), ["gpu-fp16", "gpu-fp16-torch", "gpu-fp16-compiled"]),
        (False, (), ["gpu-fp16"]),
        (False, ("gpu-fp16",), ["gpu-fp16-torch"]),
    ],
)
def test_search_without_a_gpu_accepts_one_graph_for_it(
    runner: RecordingRunner,
    monkeypatch: pytest.MonkeyPatch,
    is_here: bool,
    rejected: tuple[str, ...],
    expected: list[str],
) -> None:
    monkeypatch.setattr(accuracy_gate, "has_device", lambda device: is_here)
    gate = SlowGate(*(recipe for recipe in FULL.decoders if recipe.name in rejected))
    selected = select(runner, gate, 60, Device.GPU)
    assert [recipe.name for recipe in selected] == expected
