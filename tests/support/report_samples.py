"""Sample reports of builds, with measured stages."""

from __future__ import annotations

from collections.abc import Mapping

from build_artifacts.report.values import (
    Report,
    ReportConditions,
    ReportOptions,
    StageLatency,
    StageResult,
    StageThroughput,
    add_speedups,
)
from deployments.artifacts.types import Device
from deployments.tuning.host import Host

HOST = Host(device=Device.CPU, name="Abacus 9", generation="1", flags=("avx2",), cores=2)
OPTIONS = ReportOptions(runs=50, threads=2, seconds=300.0, evaluation=None, limit=None)
SETTING = ReportConditions(
    version="0123456789ab",
    host=HOST,
    gpu=None,
    versions={"torch": "2.0"},
    options=OPTIONS,
    served={"cpu-2": ("cpu-int8",)},
)


def latency(tokens: int, mean_ms: float, runs: int = 50) -> StageLatency:
    return StageLatency(
        tokens=tokens,
        runs=runs,
        mean_ms=mean_ms,
        std_ms=mean_ms / 10,
        median_ms=mean_ms,
        p95_ms=mean_ms * 1.2,
    )


def throughput(items_per_s: float) -> StageThroughput:
    return StageThroughput(items=32, tokens=128, passes=2, rounds=5, items_per_s=items_per_s)


def stage(
    name: str,
    means_ms: Mapping[int, float],
    *,
    items_per_s: float = 100.0,
    is_baseline_path: bool = True,
) -> StageResult:
    return StageResult(
        name=name,
        what=f"what {name} is",
        is_baseline_path=is_baseline_path,
        size_bytes=90_900_000,
        cosine=0.99,
        agreement=None,
        scores={},
        latencies=tuple(latency(tokens, ms) for tokens, ms in means_ms.items()),
        throughput=throughput(items_per_s),
    )


STAGES = (
    stage("torch", {32: 8.0, 64: 16.0}, items_per_s=50.0),
    stage("int8", {32: 1.0, 64: 8.0}, items_per_s=200.0),
    stage("fused-int8", {32: 4.0, 64: 4.0}, is_baseline_path=False),
)


def report_of(*stages: StageResult, conditions: ReportConditions = SETTING) -> Report:
    return Report(
        id="some/model",
        conditions=conditions,
        source="a directory",
        metric=None,
        measured_at="2026-01-02T03:04:05+00:00",
        command="hundredfold models report some/model",
        stages=add_speedups(stages or STAGES),
        unmeasured={},
    )
