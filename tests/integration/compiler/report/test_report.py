"""The whole command on a tiny pruned model: every stage is made, opened, judged and timed."""

from __future__ import annotations

import pytest

from build_artifacts.__main__ import main
from tests.integration.compiler.report.conftest import Journey

STAGES = ["torch", "pruned", "onnx", "optimized", "int8", "fused-int8"]


def test_the_stages_are_those_of_the_journey_in_order(journey: Journey) -> None:
    report = journey.report
    assert [stage.name for stage in report.stages] == STAGES
    assert [stage.name for stage in report.stages if not stage.is_baseline_path] == ["fused-int8"]
    assert report.unmeasured == {}
    assert journey.build.manifest.pruned is not None
    assert journey.build.manifest.pruned in report.stages[1].what


def test_every_stage_was_timed_at_every_length_the_model_reads(journey: Journey) -> None:
    for stage in journey.report.stages:
        assert [(one.tokens, one.runs) for one in stage.latencies] == [(32, 5), (64, 5)]
        assert stage.throughput is not None
        assert (stage.throughput.items, stage.throughput.tokens) == (32, 64)
        assert stage.speedup is not None
        assert stage.speedup > 0
    assert journey.report.stages[0].speedup == pytest.approx(1.0)


def test_every_stage_answers_like_the_reference(journey: Journey) -> None:
    cosines = {stage.name: stage.cosine for stage in journey.report.stages}
    exact = ("torch", "pruned", "onnx", "optimized")
    assert all(cosines[name] == pytest.approx(1.0, abs=1e-5) for name in exact)
    sealed = journey.build.manifest.candidates[0].parity.cosine_mean
    assert cosines["int8"] == pytest.approx(sealed, abs=1e-4)


def test_every_stage_has_its_own_score_of_the_data(journey: Journey) -> None:
    report = journey.report
    assert report.metric == "spearman"
    scores = {stage.name: stage.scores["spearman"] for stage in report.stages}
    assert scores["onnx"] == pytest.approx(scores["torch"], abs=1e-6)
    assert all(-1 <= score <= 1 for score in scores.values())


def test_what_is_smaller_is_stated_smaller(journey: Journey) -> None:
    size = {stage.name: stage.size_bytes for stage in journey.report.stages}
    assert size["pruned"] < size["torch"]
    assert size["int8"] < size["onnx"]
    sealed = journey.build.manifest
    assert size["int8"] == sealed.files[sealed.candidates[0].graph].size


def test_it_is_shown_and_kept_beside_the_cost_tables(journey: Journey) -> None:
    _heading, stages, speedups, _remarks = journey.shown.split("\n\n")
    for rows in (stages, speedups):
        assert [line.split()[0] for line in rows.splitlines()[-len(STAGES) :]] == STAGES
    assert max(map(len, journey.shown.splitlines())) <= 120
    kept = {path.name for path in journey.path.parent.iterdir() if path.name.startswith("report")}
    assert kept == {"report.json", "report.md", "report.png", "report.svg"}
    assert journey.report.command in (journey.path.with_suffix(".md")).read_text(encoding="utf-8")


def test_asking_again_shows_what_was_measured(
    journey: Journey, capfd: pytest.CaptureFixture[str]
) -> None:
    before = journey.path.read_bytes()
    assert main(journey.command()) == 0
    said = capfd.readouterr()
    assert said.out == journey.shown
    assert said.err == ""
    assert journey.path.read_bytes() == before


def test_data_that_cannot_be_read_is_refused_before_anything_is_measured(
    journey: Journey, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*journey.command(), "--eval", str(journey.store / "nowhere.tsv")]) == 1
    error, blank, hint = capfd.readouterr().err.splitlines()
    assert error.startswith("error: `")
    assert "cannot be read" in error
    assert blank == ""
    assert hint.startswith("hint: ")
