"""The `report` command on a tiny pruned model: accuracy, latency and files of all stages."""

from __future__ import annotations

import pytest

from build_artifacts.__main__ import main
from tests.integration.compiler.report.conftest import ReportRun

STAGES = ["torch", "pruned", "onnx", "optimized", "int8", "fused-int8"]


def test_report_has_all_stages_in_order(report_run: ReportRun) -> None:
    report = report_run.report
    assert [stage.name for stage in report.stages] == STAGES
    assert [stage.name for stage in report.stages if not stage.is_baseline_path] == ["fused-int8"]
    assert report.unmeasured == {}
    assert report_run.build.manifest.pruned is not None
    assert report_run.build.manifest.pruned in report.stages[1].what


def test_every_stage_has_latencies_of_all_lengths(report_run: ReportRun) -> None:
    for stage in report_run.report.stages:
        assert [(one.tokens, one.runs) for one in stage.latencies] == [(32, 5), (64, 5)]
        assert stage.throughput is not None
        assert (stage.throughput.items, stage.throughput.tokens) == (32, 64)
        assert stage.speedup is not None
        assert stage.speedup > 0
    assert report_run.report.stages[0].speedup == pytest.approx(1.0)


def test_stage_outputs_match_reference(report_run: ReportRun) -> None:
    cosines = {stage.name: stage.cosine for stage in report_run.report.stages}
    exact = ("torch", "pruned", "onnx", "optimized")
    assert all(cosines[name] == pytest.approx(1.0, abs=1e-5) for name in exact)
    sealed = report_run.build.manifest.candidates[0].parity.cosine_mean
    assert cosines["int8"] == pytest.approx(sealed, abs=1e-4)


def test_served_stage_has_the_batched_values_of_the_gate(report_run: ReportRun) -> None:
    sealed = report_run.build.manifest.candidates[0].parity
    batched = {stage.name: stage.batched_cosine_worst for stage in report_run.report.stages}
    assert batched == {**dict.fromkeys(STAGES), "int8": sealed.batched_cosine_worst}


def test_every_stage_has_task_scores(report_run: ReportRun) -> None:
    report = report_run.report
    assert report.metric == "spearman"
    scores = {stage.name: stage.scores["spearman"] for stage in report.stages}
    assert scores["onnx"] == pytest.approx(scores["torch"], abs=1e-6)
    assert all(-1 <= score <= 1 for score in scores.values())


def test_reduced_stages_have_smaller_sizes(report_run: ReportRun) -> None:
    size = {stage.name: stage.size_bytes for stage in report_run.report.stages}
    assert size["pruned"] < size["torch"]
    assert size["int8"] < size["onnx"]
    sealed = report_run.build.manifest
    assert size["int8"] == sealed.files[sealed.candidates[0].graph].size


def test_report_is_printed_and_stored_in_four_files(report_run: ReportRun) -> None:
    _heading, stages, speedups, _remarks = report_run.output.split("\n\n")
    for rows in (stages, speedups):
        assert [line.split()[0] for line in rows.splitlines()[-len(STAGES) :]] == STAGES
    assert max(map(len, report_run.output.splitlines())) <= 120
    report_files = {
        path.name for path in report_run.path.parent.iterdir() if path.name.startswith("report")
    }
    assert report_files == {"report.json", "report.md", "report.png", "report.svg"}
    assert report_run.report.command in (report_run.path.with_suffix(".md")).read_text(
        encoding="utf-8"
    )


def test_second_report_reads_stored_measurements(
    report_run: ReportRun, capfd: pytest.CaptureFixture[str]
) -> None:
    before = report_run.path.read_bytes()
    assert main(report_run.command()) == 0
    captured = capfd.readouterr()
    assert captured.out == report_run.output
    assert captured.err == ""
    assert report_run.path.read_bytes() == before


def test_unreadable_data_is_rejected_before_measurement(
    report_run: ReportRun, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*report_run.command(), "--eval", str(report_run.store / "nowhere.tsv")]) == 1
    error, blank, hint = capfd.readouterr().err.splitlines()
    assert error.startswith("error: `")
    assert "cannot be read" in error
    assert blank == ""
    assert hint.startswith("hint: ")
