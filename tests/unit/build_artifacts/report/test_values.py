from __future__ import annotations

import pytest
from pydantic import ValidationError

from build_artifacts.report.values import Report, StageLatency, add_speedups
from tests.support.report_samples import latency, report_of, stage


def test_a_latency_is_mean_spread_median_and_tail_in_milliseconds() -> None:
    found = StageLatency.of(32, [0.001, 0.002, 0.003, 0.004, 0.010])
    assert (found.tokens, found.runs) == (32, 5)
    assert found.mean_ms == pytest.approx(4.0)
    assert found.std_ms == pytest.approx(3.5355, abs=1e-4)  # of a sample: divided by n - 1
    assert found.median_ms == pytest.approx(3.0)
    assert found.p95_ms == pytest.approx(8.8)


def test_one_run_has_no_spread() -> None:
    assert StageLatency.of(32, [0.002]).std_ms == 0.0


def test_speedups_are_ratios_of_means_and_their_geometric_mean() -> None:
    torch, int8, aside = report_of().stages
    assert [one.speedup for one in torch.latencies] == [1.0, 1.0]
    assert [one.speedup for one in int8.latencies] == [8.0, 2.0]
    assert int8.speedup == pytest.approx(4.0)
    assert [one.speedup for one in aside.latencies] == [2.0, 4.0]
    assert int8.throughput is not None
    assert int8.throughput.speedup == pytest.approx(4.0)


def test_without_a_baseline_there_are_no_speedups() -> None:
    (alone,) = add_speedups([stage("int8", {32: 1.0})])
    assert alone.speedup is None
    assert alone.latencies[0].speedup is None


def test_only_lengths_that_the_baseline_has_are_compared() -> None:
    _, int8 = add_speedups([stage("torch", {32: 6.0}), stage("int8", {32: 2.0, 64: 4.0})])
    assert [one.speedup for one in int8.latencies] == [3.0, None]
    assert int8.speedup == pytest.approx(3.0)


def test_the_runs_of_a_length_are_those_of_the_stage_with_the_fewest() -> None:
    torch = stage("torch", {}).model_copy(update={"latencies": (latency(64, 1.0, runs=7),)})
    int8 = stage("int8", {32: 1.0, 64: 1.0})
    report = report_of(torch, int8)
    assert report.runs == {32: 50, 64: 7}
    assert report.lengths == (32, 64)


def test_json_reads_back_as_it_was() -> None:
    report = report_of()
    assert Report.model_validate_json(report.to_json()) == report


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValidationError):
        Report.model_validate_json(
            report_of().to_json().replace(b'"cosine": 0.99', b'"cosine": NaN')
        )
