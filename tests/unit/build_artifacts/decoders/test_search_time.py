"""How long a build of a model that generates looks for further graphs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from build_artifacts.decoders import build
from build_artifacts.decoders.build import DecoderBuild
from build_artifacts.recipes import FULL, DecoderRecipe
from deployments.artifacts.types import Device
from tests.support.prepared_build import RecordingRunner

FOR_CPU = [recipe.name for recipe in FULL.decoders if recipe.device is Device.CPU]


class Slow:
    """An admission that takes its time, and lets everything pass but what it is told."""

    def __init__(self, *left_out: str) -> None:
        self.left_out = left_out
        self.gate_inputs: list[str] = []

    def admit(self, recipe: DecoderRecipe) -> str | None:
        time.sleep(0.01)
        self.gate_inputs.append(recipe.name)
        return None if recipe.name in self.left_out else recipe.name


@pytest.fixture
def runner(tmp_path: Path) -> RecordingRunner:
    return RecordingRunner(tmp_path / "building")


def best(runner: RecordingRunner, admission: Slow, search_seconds: float) -> list[Any]:
    building = DecoderBuild(runner.steps, FULL, tune_seconds=0, search_seconds=search_seconds)
    given: Any = admission
    return list(building._best(given, Device.CPU))


def test_with_time_left_all_that_may_be_sealed_are_tried(runner: RecordingRunner) -> None:
    assert len(FOR_CPU) == FULL.keep
    assert best(runner, Slow(), 60) == FOR_CPU
    assert runner.lines("skip") == []


def test_no_further_candidate_is_begun_after_the_time(runner: RecordingRunner) -> None:
    admission = Slow()
    assert best(runner, admission, 0.005) == admission.gate_inputs == FOR_CPU[:1]
    told = [f"{name}: the search has taken its 0 s" for name in FOR_CPU[1:]]
    assert runner.lines("skip") == told


def test_candidates_are_tried_until_one_passes_however_long_it_takes(
    runner: RecordingRunner,
) -> None:
    admission = Slow(FOR_CPU[0])
    assert best(runner, admission, 0.005) == FOR_CPU[1:2]
    assert admission.gate_inputs == FOR_CPU[:2]


def test_a_device_has_time_of_its_own(
    runner: RecordingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "has_device", lambda device: True)
    building = DecoderBuild(runner.steps, FULL, tune_seconds=0, search_seconds=0.005)
    given: Any = Slow()
    found = [*building._best(given, Device.CPU), *building._best(given, Device.GPU)]
    assert found == ["cpu-int8", "gpu-fp16"]
