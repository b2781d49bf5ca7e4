from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common.engine_timing import CoreSplit, Shape, ShapeLatency, build_timings
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.statistics import summarize
from benchmarks.graphs.candidates import (
    COMMON_RECIPE,
    OPENVINO_BASELINES,
    SEALED,
    TORCH,
    GraphCandidate,
)
from benchmarks.graphs.command import score_goals, select_systems
from benchmarks.graphs.results import (
    GraphResults,
    ParityRow,
    PlacementResults,
    describe,
    ratios,
    require_accurate,
    speed_goals,
)
from benchmarks.graphs.run import PROBES, RunInputs, compare_with_reference, open_run, rotate_order
from build_artifacts.evaluation.similarity import SimilarityEvaluation
from deployments.artifacts.manifest import Gate
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, EngineInfo
from deployments.errors import EngineFailed
from deployments.messages import Batch, Outputs
from deployments.tuning.parity import ReferenceOutputs
from tests.support.artifacts import tiny_manifest
from tests.support.fakes import item

SHAPE = Shape(8, 128)
TOGETHER, SHARED = CoreSplit(runs=1, threads=2), CoreSplit(runs=2, threads=1)
ITEMS = tuple(item(i + 1, 2 + i % 3) for i in range(70))


class Sums:
    """Answers two numbers per item, `sign` times what the reference says."""

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


class Broken(Sums):
    def run(self, batch: Batch) -> Outputs:
        raise EngineFailed("the device gave up")


def ground(*shapes: Shape) -> RunInputs:
    answers = tuple(np.array([one.ids.sum(), 1], dtype=np.float32) for one in ITEMS)
    return RunInputs(
        manifest=tiny_manifest(), reference=ReferenceOutputs(ITEMS, answers), shapes=shapes, seed=0
    )


def contender(
    name: str, engine: EncoderEngine, *, ours: bool = True, shares: bool = True
) -> GraphCandidate:
    def opened(encoder: EncoderSettings) -> EncoderEngine:
        return engine

    return GraphCandidate(name=name, what=name, open=opened, must_pass_gate=ours, shares_out=shares)


def latency(name: str, *ms: float, shape: Shape = SHAPE) -> ShapeLatency:
    return ShapeLatency(name, shape, summarize(ms))


def likeness_of(name: str, *misses: str, ours: bool = True) -> ParityRow:
    return ParityRow(
        contender=name,
        probes=32,
        cosine_mean=0.5,
        cosine_worst=0.25,
        top1_agreement=None,
        must_pass_gate=ours,
        misses=misses,
    )


def build_results(answer_agreements: tuple[ParityRow, ...]) -> PlacementResults:
    latencies = (latency(TORCH, 60.0, 50.0, 55.0), latency(SEALED, 10.0, 10.0, 10.0))
    return PlacementResults(
        placement=TOGETHER,
        served=("cpu-int8+arena",),
        latencies=latencies,
        ratios=ratios(latencies),
        answer_agreements=answer_agreements,
        missing={"openvino": "it failed"},
    )


def figures(*answer_agreements: ParityRow) -> GraphResults:
    heat = build_results(answer_agreements)
    return GraphResults(
        model_id="org/model",
        version="0123",
        contenders={SEALED: "what is served here"},
        heats=(heat,),
        metric="spearman",
        scores={TORCH: {"spearman": 0.82, "other": 0.1}},
        missing={"onnx": "cannot be exported"},
        goals=tuple(speed_goals(heat.ratios, max_tokens=512)),
    )


def test_ratios_are_taken_round_by_round() -> None:
    # In the second round the machine was half as fast: medians of times would not show the 2.
    found = ratios([latency(TORCH, 20.0, 44.0, 24.0), latency(SEALED, 10.0, 20.0, 8.0)])
    (ratio,) = found
    assert (ratio.name, ratio.shape) == ("torch / sealed", SHAPE)
    assert ratio.times.values == pytest.approx((2.0, 2.2, 3.0))
    assert ratio.times.median == pytest.approx(2.2)


def test_only_what_both_were_measured_at_is_compared() -> None:
    other = Shape(1, 16)
    found = ratios(
        [
            latency(SEALED, 2.0),
            latency(COMMON_RECIPE, 3.0, shape=other),
            latency(OPENVINO_BASELINES[0], 1.0),
        ]
    )
    assert [(one.name, one.times.median) for one in found] == [
        (f"sealed / {OPENVINO_BASELINES[0]}", 2.0)
    ]


def test_speed_goals_look_at_one_shape() -> None:
    measured = [latency(TORCH, 50.0), latency(SEALED, 10.0), latency(COMMON_RECIPE, 14.0)]
    measured += [latency(OPENVINO_BASELINES[0], 9.5), latency(OPENVINO_BASELINES[1], 9.0)]
    goals = list(speed_goals(ratios(measured), max_tokens=512))
    assert [goal.reached for goal in goals] == [True, False, True, False]
    assert goals[0].what == "torch / sealed at 8x128"
    assert [goal.reached for goal in speed_goals(ratios(measured), max_tokens=64)] == [None] * 4


def test_score_goals_count_points() -> None:
    evaluation = SimilarityEvaluation([], [])
    scores = {TORCH: 0.82, SEALED: 0.817, OPENVINO_BASELINES[0]: 0.8171}
    metrics = {name: {"spearman": value} for name, value in scores.items()}
    goals = score_goals(evaluation, metrics, Gate())
    assert [goal.reached for goal in goals] == [True, False, None]
    assert goals[0].value == pytest.approx(0.3)


def test_the_table_tells_everything() -> None:
    text = describe(figures(likeness_of(SEALED), likeness_of(TORCH, "mean cosine 0.5 < 0.985")))
    lines = [line.split() for line in text.splitlines()]
    assert ["sealed:", "cpu-int8+arena"] in lines
    assert ["sealed", "10.00", "(0%)", "0.5000", "0.2500", "-", "right"] in lines
    assert ["torch", "/", "sealed", "5.50", "(18%)"] in lines
    assert ["torch", "0.8200"] in lines
    assert "not measured: onnx: cannot be exported" in text
    assert "not measured: openvino, runs=1 threads=2: it failed" in text
    assert text.splitlines()[-4] == "torch / sealed at 8x128: 5.500, at least 5: reached"


def test_a_wrong_graph_of_ours_is_an_error_and_a_rival_s_is_not() -> None:
    require_accurate(figures(likeness_of(COMMON_RECIPE, "worst cosine 0.9 < 0.93", ours=False)))
    with pytest.raises(BenchmarkError, match=r"sealed, runs=1 threads=2: worst cosine 0\.9"):
        require_accurate(figures(likeness_of(SEALED, "worst cosine 0.9 < 0.93")))


def test_another_one_goes_first_in_every_round() -> None:
    names = dict.fromkeys("abc", len)
    cells = build_timings(names, [Shape(1, 2), Shape(2, 2)], ITEMS, seed=0)
    assert "".join(cell.contender for cell in rotate_order(cells, 0)) == "abcabc"
    assert "".join(cell.contender for cell in rotate_order(cells, 1)) == "bcabca"
    assert "".join(cell.contender for cell in rotate_order(cells, 5)) == "cabcab"


def test_a_rival_that_fails_is_left_out_and_all_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.common.engine_timing.TIMING_S", 0.001)
    good, bad = Sums(), Broken()
    entered = [contender("good", good), contender("bad", bad, ours=False)]
    with open_run(entered, TOGETHER, ground(Shape(2, 3))) as heat:
        assert heat.failed == {"bad": "the device gave up"}
        assert bad.is_closed
        heat.run_round(0, "round 1")
        assert [(cell.contender, len(cell.medians_ms)) for cell in heat.cells] == [("good", 1)]
        assert not good.is_closed
    assert good.is_closed
    assert set(good.sizes) == {2}


def test_one_of_ours_that_fails_ends_the_run() -> None:
    good = Sums()
    entered = [contender("good", good), contender("bad", Broken())]
    with pytest.raises(EngineFailed), open_run(entered, TOGETHER, ground(SHAPE)):
        pass
    assert good.is_closed


def test_as_an_encoder_runs_batches_are_shared_out() -> None:
    entered = [contender("sealed", Sums()), contender("torch", Sums(), shares=False)]
    course = ground(Shape(1, 4), Shape(5, 4))
    assert select_systems(entered, TOGETHER, course) == (entered, course)
    able, own = select_systems(entered, SHARED, course)
    assert [one.name for one in able] == ["sealed"]
    assert list(own.shapes) == [Shape(5, 4)]
    engine = Sums()
    with open_run([contender("sealed", engine)], SHARED, own):
        assert sorted(set(engine.sizes)) == [2, 3]


@pytest.mark.parametrize(("sign", "is_right"), [(1.0, True), (-1.0, False)])
def test_likeness_is_judged_by_the_gate(sign: float, is_right: bool) -> None:
    engine = Sums(sign)
    found = compare_with_reference(engine, contender("sealed", engine), ground(SHAPE))
    assert found.probes == PROBES
    assert engine.sizes == [1] * PROBES
    assert found.cosine_worst == pytest.approx(sign)
    assert (not found.misses) is is_right


def test_answers_that_are_no_numbers_have_no_likeness() -> None:
    engine = Sums(float("nan"))
    found = compare_with_reference(engine, contender("sealed", engine), ground(SHAPE))
    assert found.cosine_mean is None
    assert found.misses == ("an output is not a finite number",)


@pytest.mark.parametrize("text", ["8", "x128", "8x", "0x8", "8x-1", "8x12.5", "8x128x2"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    assert Shape.parse("8x128") == SHAPE
    with pytest.raises(ValueError, match="is no shape"):
        Shape.parse(text)
