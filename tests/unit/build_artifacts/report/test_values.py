from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from build_artifacts.report.values import Report, ServedVariants, StageLatency, add_speedups
from deployments.artifacts.manifest import Candidate, FileDigest
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.tuning.costs import TuningTarget, Variant
from tests.support.artifacts import tiny_manifest
from tests.support.report_samples import latency, report_of, stage


def test_latency_statistics_are_in_milliseconds() -> None:
    latency_stats = StageLatency.of(32, [0.001, 0.002, 0.003, 0.004, 0.010])
    assert (latency_stats.tokens, latency_stats.runs) == (32, 5)
    assert latency_stats.mean_ms == pytest.approx(4.0)
    assert latency_stats.std_ms == pytest.approx(
        3.5355, abs=1e-4
    )  # sample deviation: divided by n - 1
    assert latency_stats.median_ms == pytest.approx(3.0)
    assert latency_stats.p95_ms == pytest.approx(8.8)


def test_single_run_has_zero_deviation() -> None:
    assert StageLatency.of(32, [0.002]).std_ms == 0.0


def test_speedups_are_mean_ratios_and_geometric_mean() -> None:
    torch, int8, aside = report_of().stages
    assert [latency_item.speedup for latency_item in torch.latencies] == [1.0, 1.0]
    assert [latency_item.speedup for latency_item in int8.latencies] == [8.0, 2.0]
    assert int8.speedup == pytest.approx(4.0)
    assert [latency_item.speedup for latency_item in aside.latencies] == [2.0, 4.0]
    assert int8.throughput is not None
    assert int8.throughput.speedup == pytest.approx(4.0)


def test_speedups_without_baseline_are_none() -> None:
    (alone,) = add_speedups([stage("int8", {32: 1.0})])
    assert alone.speedup is None
    assert alone.latencies[0].speedup is None


def test_speedups_compare_only_baseline_lengths() -> None:
    _, int8 = add_speedups([stage("torch", {32: 6.0}), stage("int8", {32: 2.0, 64: 4.0})])
    assert [latency_item.speedup for latency_item in int8.latencies] == [3.0, None]
    assert int8.speedup == pytest.approx(3.0)


def test_runs_per_length_are_minimum_of_stages() -> None:
    torch = stage("torch", {}).model_copy(update={"latencies": (latency(64, 1.0, runs=7),)})
    int8 = stage("int8", {32: 1.0, 64: 1.0})
    report = report_of(torch, int8)
    assert report.runs == {32: 50, 64: 7}
    assert report.lengths == (32, 64)


def test_served_size_includes_weight_files_and_counts_shared_graphs_once(tmp_path: Path) -> None:
    manifest = tiny_manifest(devices=(Device.CPU,))
    (candidate,) = manifest.candidates
    shared = candidate.model_copy(update={"name": "cpu-shared"})
    other = candidate.model_copy(update={"name": "cpu-other", "graph": "other/graph.onnx"})
    sizes = {
        candidate.graph: 1,
        f"{candidate.graph}.data": 20,
        other.graph: 300,
        f"{other.graph}.data": 4_000,
    }
    manifest = manifest.model_copy(
        update={
            "candidates": (candidate, shared, other),
            "files": {n: FileDigest(sha256="0" * 64, size=size) for n, size in sizes.items()},
        }
    )
    target = TuningTarget(tmp_path, manifest, Device.CPU, EncoderSettings())

    def size_of(*served: Candidate) -> int:
        variants = tuple(Variant.of(each.name, each.options) for each in served)
        return ServedVariants(target, variants).size_bytes

    assert size_of(candidate) == 21
    assert size_of(candidate, shared) == 21
    assert size_of(candidate, shared, other) == 4_321


def test_report_round_trips_json() -> None:
    report = report_of()
    assert Report.model_validate_json(report.to_json()) == report


def test_nonfinite_numbers_are_rejected() -> None:
    with pytest.raises(ValidationError):
        Report.model_validate_json(
            report_of().to_json().replace(b'"cosine": 0.99', b'"cosine": NaN')
        )
