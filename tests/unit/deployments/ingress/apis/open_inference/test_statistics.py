from __future__ import annotations

from dataclasses import replace

from deployments.ingress.apis.open_inference.statistics import ModelStatistics
from deployments.messages import CallTimings, ModelRef
from deployments.records import RequestRecord

MODEL = ModelRef("org/name", "0123456789ab")
OTHER_VERSION = ModelRef("org/name", "ba9876543210")
TASK = "feature-extraction"
USED = ("org/name", TASK, "cpu-fp32")
TIMINGS = CallTimings(tokenize_s=0.001, queue_s=0.002, forward_s=0.003)


def test_statistics_sum_requests_by_outcome() -> None:
    statistics = ModelStatistics(clock=lambda: 12.5)
    for model, record in (
        (MODEL, RequestRecord(*USED, 200, 3, 0.01, "miss", timings=TIMINGS)),
        (MODEL, RequestRecord(*USED, 200, 2, 0.02, timings=TIMINGS)),
        (MODEL, RequestRecord("org/name", TASK, "cache", 200, 3, 0.0005, "hit")),
        (MODEL, RequestRecord("org/name", TASK, "none", 422, 1, 0.004)),
        (MODEL, RequestRecord("org/name", "none", "none", 400, 0, 0.001)),
        (MODEL, RequestRecord("org/name", "tokenize", "none", 200, 9, 9.0)),
        (OTHER_VERSION, RequestRecord(*USED, 200, 7, 1.0)),
    ):
        statistics.record(replace(record, version=model.version))
    result = statistics.build_stats(MODEL)
    assert (result["name"], result["version"], result["last_inference"]) == (*MODEL, 12_500)
    assert (result["inference_count"], result["execution_count"]) == (8, 2)
    assert result["inference_stats"] == {
        "success": {"count": 3, "ns": 30_500_000},
        "fail": {"count": 2, "ns": 5_000_000},
        "queue": {"count": 2, "ns": 4_000_000},
        "compute_input": {"count": 2, "ns": 2_000_000},
        "compute_infer": {"count": 2, "ns": 6_000_000},
        "compute_output": {"count": 0, "ns": 0},
        "cache_hit": {"count": 1, "ns": 500_000},
    }


def test_statistics_of_versions_are_separate() -> None:
    statistics = ModelStatistics()
    for version, items in (("old", 3), ("new", 5)):
        statistics.record(RequestRecord(*USED, 200, items, 0.01, version=version))
    counts = [
        statistics.build_stats(ModelRef("org/name", version))["inference_count"]
        for version in ("old", "new", "unused")
    ]
    assert counts == [3, 5, 0]


def test_unused_model_has_zero_statistics() -> None:
    statistics = ModelStatistics()
    result = statistics.build_stats(MODEL)
    assert result["last_inference"] == result["inference_count"] == 0
    assert not any(sum_["count"] for sum_ in result["inference_stats"].values())  # type: ignore[index]
