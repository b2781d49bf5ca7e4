from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.engine_timing import CoreSplit, ShapeLatency, build_timings
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.options import parse_shape
from benchmarks.common.statistics import summarize
from benchmarks.graphs.candidates import (
    COMMON_RECIPE,
    DYNAMIC,
    OPENVINO_BASELINES,
    SEALED,
    TORCH,
    GraphCandidate,
)
from benchmarks.graphs.command import score_goals, select_systems
from benchmarks.graphs.results import (
    CoreSplitResults,
    GraphResults,
    ParityRow,
    compute_ratios,
    describe,
    require_accurate,
    speed_goals,
)
from benchmarks.graphs.run import PROBES, RunInputs, compare_with_reference, open_run, rotate_order
from build_artifacts.evaluation.base import EvaluatedModel
from build_artifacts.evaluation.similarity import SimilarityEvaluation
from deployments.artifacts.manifest import Gate
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, EngineInfo
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import EngineFailed
from deployments.tuning.costs import Shape
from deployments.tuning.parity import ReferenceOutputs
from tests.support.artifacts import tiny_manifest
from tests.support.fakes import item

SHAPE = Shape(items=8, tokens=128)
ONE_PASS, TWO_PASSES = CoreSplit(passes=1, threads=2), CoreSplit(passes=2, threads=1)
ITEMS = tuple(item(i + 1, 2 + i % 3) for i in range(70))


class Sums:
    """Engine that returns `sign` times the reference output, two numbers per item."""

    def __init__(self, sign: float = 1.0) -> None:
        self.info = EngineInfo(compute_type="cpu-fp32")
        self.sign = sign
        self.sizes: list[int] = []
        self.is_closed = False

    def run(self, batch: Batch) -> Outputs:
        self.sizes.append(len(batch.lengths))
        sums = (batch.input_ids * batch.attention_mask).sum(axis=1, keepdims=True)
        return Outputs(self.sign * np.hstack([sums, np.ones_like(sums)]).astype(np.float32))

    def close(self) -> None:
        self.is_closed = True


class BrokenSums(Sums):
    def run(self, batch: Batch) -> Outputs:
        raise EngineFailed("the device gave up")


def run_inputs(*shapes: Shape) -> RunInputs:
    answers = tuple(np.array([one.ids.sum(), 1], dtype=np.float32) for one in ITEMS)
    return RunInputs(
        manifest=tiny_manifest(), reference=ReferenceOutputs(ITEMS, answers), shapes=shapes, seed=0
    )


def candidate(
    name: str, engine: EncoderEngine, *, must_pass: bool = True, can_split: bool = True
) -> GraphCandidate:
    def open_engine(encoder: EncoderSettings) -> EncoderEngine:
        return engine

    return GraphCandidate(
        name=name, what=name, open=open_engine, must_pass_gate=must_pass, can_split=can_split
    )


def latency(name: str, *ms: float, shape: Shape = SHAPE) -> ShapeLatency:
    return ShapeLatency(name, shape, summarize(ms))


def parity_row(name: str, *violations: str, must_pass: bool = True) -> ParityRow:
    return ParityRow(
        system=name,
        probes=32,
        cosine_mean=0.5,
        cosine_worst=0.25,
        top1_agreement=None,
        must_pass_gate=must_pass,
        violations=violations,
    )


def build_results(parity: tuple[ParityRow, ...]) -> CoreSplitResults:
    latencies = (latency(TORCH, 60.0, 50.0, 55.0), latency(SEALED, 10.0, 10.0, 10.0))
    return CoreSplitResults(
        split=ONE_PASS,
        served=("cpu-int8+spinning",),
        latencies=latencies,
        ratios=compute_ratios(latencies),
        parity=parity,
        missing={"openvino": "it failed"},
    )


def graph_results(*parity: ParityRow) -> GraphResults:
    run = build_results(parity)
    return GraphResults(
        model_id="org/model",
        version="0123",
        systems={SEALED: "the served variants"},
        runs=(run,),
        metric="spearman",
        scores={TORCH: {"spearman": 0.82, "other": 0.1}},
        missing={"onnx": "cannot be exported"},
        goals=tuple(speed_goals(run.ratios, max_tokens=512)),
    )


def test_compute_ratios_divides_round_by_round() -> None:
    # The machine is half as fast in round 2. The ratio of the two medians would mix rounds 1 and 3.
    ratios = compute_ratios([latency(TORCH, 20.0, 44.0, 24.0), latency(SEALED, 10.0, 20.0, 8.0)])
    (ratio,) = ratios
    assert (ratio.name, ratio.shape) == ("torch / sealed", SHAPE)
    assert ratio.ratio.values == pytest.approx((2.0, 2.2, 3.0))
    assert ratio.ratio.median == pytest.approx(2.2)


def test_compute_ratios_requires_both_systems_at_a_shape() -> None:
    other = Shape(items=1, tokens=16)
    result = compute_ratios(
        [
            latency(SEALED, 2.0),
            latency(COMMON_RECIPE, 3.0, shape=other),
            latency(OPENVINO_BASELINES[0], 1.0),
        ]
    )
    assert [(one.name, one.ratio.median) for one in result] == [
        (f"sealed / {OPENVINO_BASELINES[0]}", 2.0)
    ]


def test_speed_goals_use_one_shape() -> None:
    measured = [latency(TORCH, 50.0), latency(SEALED, 10.0), latency(COMMON_RECIPE, 14.0)]
    measured += [latency(OPENVINO_BASELINES[0], 9.5), latency(OPENVINO_BASELINES[1], 9.0)]
    measured += [latency(DYNAMIC, 9.5)]
    goals = list(speed_goals(compute_ratios(measured), max_tokens=512))
    assert [goal.reached for goal in goals] == [True, False, False, True, False]
    assert goals[0].what == "torch / sealed at 8x128"
    assert [goal.reached for goal in speed_goals(compute_ratios(measured), max_tokens=64)] == [
        None
    ] * 5


def test_score_goals_bound_the_metric_drop() -> None:
    evaluation = SimilarityEvaluation([], [], EvaluatedModel(directory=Path(), max_tokens=1))
    scores = {TORCH: 0.82, SEALED: 0.8175, OPENVINO_BASELINES[0]: 0.8176}
    metrics = {name: {"spearman": value} for name, value in scores.items()}
    goals = score_goals(evaluation, metrics, Gate())
    assert [goal.reached for goal in goals] == [True, False, None]
    assert goals[0].value == pytest.approx(0.25)


def test_describe_lists_all_results() -> None:
    text = describe(graph_results(parity_row(SEALED), parity_row(TORCH, "mean cosine 0.5 < 0.985")))
    lines = [line.split() for line in text.splitlines()]
    assert ["sealed,", "passes=1", "threads=2:", "cpu-int8+spinning"] in lines
    assert ["sealed", "10.00", "(0%)", "0.5000", "0.2500", "-", "passed"] in lines
    assert ["torch", "/", "sealed", "5.50", "(18%)"] in lines
    assert ["torch", "0.8200"] in lines
    assert "not measured: onnx: cannot be exported" in text
    assert "not measured: openvino, passes=1 threads=2: it failed" in text
    assert text.splitlines()[-5] == "torch / sealed at 8x128: 5.500, at least 5: reached"


def test_require_accurate_ignores_baselines() -> None:
    require_accurate(
        graph_results(parity_row(COMMON_RECIPE, "worst cosine 0.9 < 0.93", must_pass=False))
    )
    with pytest.raises(BenchmarkError, match=r"sealed, passes=1 threads=2: worst cosine 0\.9"):
        require_accurate(graph_results(parity_row(SEALED, "worst cosine 0.9 < 0.93")))


def test_rotate_order_changes_the_first_system() -> None:
    names = dict.fromkeys("abc", lambda batch: None)
    timings = build_timings(
        names, [Shape(items=1, tokens=2), Shape(items=2, tokens=2)], ITEMS, seed=0
    )
    assert "".join(timing.system for timing in rotate_order(timings, 0)) == "abcabc"
    assert "".join(timing.system for timing in rotate_order(timings, 1)) == "bcabca"
    assert "".join(timing.system for timing in rotate_order(timings, 5)) == "cabcab"


def test_open_run_skips_a_failed_baseline_and_closes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.common.engine_timing.TIMING_S", 0.001)
    good, bad = Sums(), BrokenSums()
    candidates = [candidate("good", good), candidate("bad", bad, must_pass=False)]
    with open_run(candidates, ONE_PASS, run_inputs(Shape(items=2, tokens=3))) as run:
        assert run.failed == {"bad": "the device gave up"}
        assert bad.is_closed
        run.run_round(0, "round 1")
        assert [(timing.system, len(timing.medians_ms)) for timing in run.timings] == [("good", 1)]
        assert not good.is_closed
    assert good.is_closed
    assert set(good.sizes) == {2}


def test_open_run_raises_for_a_failed_candidate() -> None:
    good = Sums()
    candidates = [candidate("good", good), candidate("bad", BrokenSums())]
    with pytest.raises(EngineFailed), open_run(candidates, ONE_PASS, run_inputs(SHAPE)):
        pass
    assert good.is_closed


def test_select_systems_for_concurrent_passes() -> None:
    candidates = [candidate("sealed", Sums()), candidate("torch", Sums(), can_split=False)]
    inputs = run_inputs(Shape(items=1, tokens=4), Shape(items=5, tokens=4))
    assert select_systems(candidates, ONE_PASS, inputs) == (candidates, inputs)
    able, own = select_systems(candidates, TWO_PASSES, inputs)
    assert [one.name for one in able] == ["sealed"]
    assert list(own.shapes) == [Shape(items=5, tokens=4)]
    engine = Sums()
    with open_run([candidate("sealed", engine)], TWO_PASSES, own):
        assert sorted(set(engine.sizes)) == [2, 3]


@pytest.mark.parametrize(("sign", "is_accurate"), [(1.0, True), (-1.0, False)])
def test_compare_with_reference_applies_the_gate(sign: float, is_accurate: bool) -> None:
    engine = Sums(sign)
    result = compare_with_reference(engine, candidate("sealed", engine), run_inputs(SHAPE))
    assert result.probes == PROBES
    assert engine.sizes == [1] * PROBES
    assert result.cosine_worst == pytest.approx(sign)
    assert (not result.violations) is is_accurate


def test_compare_with_reference_rejects_nan_outputs() -> None:
    engine = Sums(float("nan"))
    result = compare_with_reference(engine, candidate("sealed", engine), run_inputs(SHAPE))
    assert result.cosine_mean is None
    assert result.violations == ("an output is not a finite number",)


@pytest.mark.parametrize("text", ["8", "x128", "8x", "0x8", "8x-1", "8x12.5", "8x128x2"])
def test_parse_shape_rejects_invalid_text(text: str) -> None:
    assert parse_shape("8x128") == SHAPE
    with pytest.raises(argparse.ArgumentTypeError, match="is no shape"):
        parse_shape(text)
