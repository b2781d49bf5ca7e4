from __future__ import annotations

import pytest

from build_artifacts.report.output import format_markdown, format_number, format_stages
from tests.support.report_samples import STAGES, report_of, stage


def cells(line: str) -> list[str]:
    return line.split()


def test_table_has_row_and_speedup_per_stage() -> None:
    lines = format_stages(report_of()).splitlines()
    assert lines[0] == "some/model 0123456789ab on Abacus 9"
    assert lines[1] == "latency in ms (mean ±std): batch 1 on 2 of 2 cores, 50 sequential runs"
    header, torch, int8, aside = lines[3:7]
    assert cells(header)[:3] == ["stage", "MB", "cosine"]
    assert cells(torch) == [
        *("torch", "90.9", "0.9900", "8.00", "±0.80", "16.0", "±1.60", "50.0", "1.00x"),
    ]
    assert cells(int8)[-2:] == ["200", "4.00x"]
    assert cells(aside)[:2] == ["fused-int8", "†"]
    assert "† measured for comparison only" in lines
    # Second table: speed-ups at two lengths (8 and 2), their mean (4), and throughput (4).
    assert ["int8", "8.00x", "2.00x", "4.00x", "4.00x"] in map(cells, lines)


def test_table_columns_are_aligned() -> None:
    lengths = {32: 123.4, 64: 1234.5, 128: 99.9, 256: 1234.5, 512: 98765.4}
    found = report_of(stage("torch", lengths), stage("fused-int8", lengths, is_baseline_path=False))
    lines = format_stages(found.model_copy(update={"metric": "spearman"})).splitlines()
    header, *rows = lines[3:6]
    assert {len(row) for row in rows} == {len(header)}
    assert max(map(len, lines)) <= 120


def test_table_shows_choices_of_answers() -> None:
    chooser = STAGES[0].model_copy(update={"agreement": 0.985})
    header, torch = format_stages(report_of(chooser)).splitlines()[3:5]
    assert cells(header)[2] == "top-1"
    assert cells(torch)[2] == "98.5%"


def test_batched_values_of_the_gate_are_reported() -> None:
    vectors = STAGES[1].model_copy(update={"batched_cosine_worst": 0.99995})
    labels = vectors.model_copy(update={"name": "labels", "batched_top1_agreement": 1.0})
    report = report_of(STAGES[0], vectors, labels)
    expected = (
        "int8: worst of a text in a batch to the same text alone: cosine 1.0000",
        "labels: worst of a text in a batch to the same text alone: cosine 1.0000, top-1 100.0%",
    )
    printed = format_stages(report).splitlines()
    written = format_markdown(report, plot=None).splitlines()
    for line in expected:
        assert line in printed
        assert f"- {line}" in written
    assert not [line for line in printed if line.startswith("torch: worst")]


def test_unmeasured_score_is_a_dash() -> None:
    scored = STAGES[0].model_copy(update={"scores": {"spearman": 0.82031}})
    report = report_of(scored, STAGES[1]).model_copy(update={"metric": "spearman"})
    torch, int8 = format_stages(report).splitlines()[4:6]
    assert cells(torch)[2] == "0.8203"
    assert cells(int8)[2] == "-"


def test_reduced_runs_are_reported() -> None:
    few = STAGES[0].latencies[0].model_copy(update={"runs": 9})
    cut = STAGES[0].model_copy(update={"latencies": (few, STAGES[0].latencies[1])})
    report = report_of(cut)
    expected_line = "runs cut to fit 300 s: 9 of 32 tokens, 50 of 64 tokens"
    assert expected_line in format_stages(report).splitlines()
    assert f"- {expected_line}" in format_markdown(report, plot=None).splitlines()


def test_missing_baseline_leaves_one_table_and_reason() -> None:
    report = report_of(STAGES[1]).model_copy(update={"unmeasured": {"torch": "it is gone"}})
    text = format_stages(report)
    assert "speed-up over" not in text
    assert "not measured: torch: it is gone" in text


def test_markdown_has_table_host_versions_and_command() -> None:
    lines = format_markdown(report_of(), plot="report.svg").splitlines()
    grid = [line for line in lines if line.startswith("|")]
    assert grid[1] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert {line.count("|") for line in grid[:5]} == {8}
    text = "\n".join(lines)
    for fact in ("Abacus 9, 2 cores (avx2)", "torch 2.0", "`hundredfold models report "):
        assert fact in text
    assert "![latency by tokens, and speed-up](report.svg)" in lines
    assert "![" not in format_markdown(report_of(), plot=None)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1234, "0.12"), (9.994, "9.99"), (9.996, "10.0"), (99.96, "100"), (1234.5, "1234")],
)
def test_format_number_rounds_to_three_significant_digits(value: float, text: str) -> None:
    assert format_number(value) == text
