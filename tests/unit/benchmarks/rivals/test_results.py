from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.statistics import summarize
from benchmarks.rivals.results import (
    AnswerCheck,
    CompletionCheck,
    LevelName,
    OurModel,
    PairedLevel,
    RivalResult,
    RivalResults,
    build_tables,
    describe,
    require_answered,
)
from benchmarks.serving.load import LoadResult

SENTENCES = LevelName("sentences", 8)
RIGHT = AnswerCheck(
    compared=4, worst_cosine=0.9999, required_cosine=0.999, tokens_per_response=None
)


def completed(
    compared: int = 4, *, same: int = 4, empty: int = 0, must_be_equal: bool = False
) -> AnswerCheck:
    return AnswerCheck(
        compared=compared,
        worst_cosine=None,
        required_cosine=None,
        tokens_per_response=9.5,
        completions=CompletionCheck(
            empty=empty, same=same, equal_leading_share=0.25, must_be_equal=must_be_equal
        ),
    )


MODEL = OurModel(id="a/b", version="v1", compute_type="cpu-int8", is_generative=False, check=RIGHT)


def load(requests: int, latency_s: float, failures: dict[str, int] | None = None) -> LoadResult:
    latencies = np.full(requests, latency_s)
    return LoadResult(8, 2.0, latencies, failures or {}, cpu_s=0.1)


def paired(
    theirs: list[LoadResult], ours: list[LoadResult], work_ratio: float = 1.0
) -> PairedLevel:
    return PairedLevel.summarize(SENTENCES, theirs, ours, work_ratio)


def results(*levels: PairedLevel) -> RivalResults:
    rival = RivalResult(
        name="toy",
        title="Toy",
        package="toy",
        version="1.0",
        computes_with="fp32",
        packages={},
        check=RIGHT,
        levels=levels,
        skipped=(),
        idle_cores=None,
    )
    return RivalResults(
        models=(MODEL,),
        rounds=2,
        window_s=2.0,
        workloads={"sentences": 14.2, "documents": 256.0},
        engine={"sentences": summarize([80.0, 100.0, 90.0])},
        idle_cores=None,
        rivals=(rival,),
        missing={"Triton": "an image"},
    )


def test_paired_level_takes_the_ratios_within_rounds() -> None:
    level = paired(
        [load(10, 0.2), load(20, 0.1), load(40, 0.05)],
        [load(30, 0.1), load(40, 0.05), load(160, 0.01)],
    )
    assert level.rate_ratio is not None
    assert level.rate_ratio.values == (3.0, 2.0, 4.0)
    assert level.rate_ratio.median == 3.0
    assert level.p50_ratio is not None
    assert level.p50_ratio.values == pytest.approx((2.0, 2.0, 5.0))


def test_work_ratio_weights_responses_of_different_length() -> None:
    level = paired([load(10, 0.1)], [load(10, 0.1)], work_ratio=2.0)
    assert level.rate_ratio is not None
    assert level.rate_ratio.median == 2.0


def test_a_round_without_response_has_no_ratio() -> None:
    level = paired([load(10, 0.1), load(0, 0.0)], [load(10, 0.1), load(10, 0.1)])
    assert level.rate_ratio is None
    assert level.p50_ratio is None


def test_tables_show_rates_failures_and_ratios() -> None:
    level = paired([load(10, 0.2, {"503": 2})], [load(30, 0.1)])
    tables = {table.name: table for table in build_tables(results(level))}
    assert list(tables) == ["sentences", "workloads", "systems", "missing"]
    assert tables["workloads"].rows == [["sentences", "14.2"], ["documents", "256.0"]]
    ours, engine, theirs = tables["sentences"].rows
    assert ours == ["hundredfold", "cpu-int8", "15.0", "100.0", "-"]
    assert engine == ["the engine alone", "cpu-int8", "90.0", "-", "0.17"]
    assert theirs == ["Toy", "fp32", "5.0 (2 failed)", "200.0", "3.00"]
    assert tables["systems"].rows[1] == ["Toy", "toy 1.0", "fp32", "4", "0.9999", "-", "-"]
    generated = replace(results(), models=(replace(MODEL, check=completed()),))
    systems = {table.name: table for table in build_tables(generated)}["systems"]
    assert systems.rows[0][-4:] == ["4", "-", "25%", "-"]
    assert tables["missing"].rows == [["Triton", "an image"]]


def test_failures_of_hundredfold_are_shown_and_rejected() -> None:
    measured = results(paired([load(10, 0.2)], [load(30, 0.1, {"503": 5})]))
    ours = build_tables(measured)[0].rows[0]
    assert ours[2] == "15.0 (5 failed)"
    with pytest.raises(BenchmarkError, match=r"requests to hundredfold failed.*'503': 5"):
        require_answered(measured)
    require_answered(results(paired([load(10, 0.2, {"503": 2})], [load(30, 0.1)])))


def test_tables_leave_skipped_levels_empty() -> None:
    slow = results(paired([load(1, 1.0)], [load(10, 0.1)]))
    fast_level = replace(slow.rivals[0].levels[0], level=LevelName("sentences", 64))
    fast = replace(slow.rivals[0], title="Fast", levels=(*slow.rivals[0].levels, fast_level))
    table = build_tables(replace(slow, rivals=(slow.rivals[0], fast)))[0]
    assert table.rows[2][-3:] == ["-", "-", "-"]
    assert "-" not in table.rows[3]


def test_describe_without_a_measured_rival_names_what_is_missing() -> None:
    text = describe(replace(results(), rivals=()))
    assert "Triton" in text


@pytest.mark.parametrize(
    ("check", "is_met"),
    [
        (RIGHT, True),
        (replace(RIGHT, worst_cosine=0.99), False),
        (replace(RIGHT, compared=0), False),
        (completed(), True),
        (completed(compared=0), False),
        (completed(same=3), True),
        (completed(same=3, must_be_equal=True), False),
        (completed(same=3, empty=1), False),
    ],
)
def test_answer_check(check: AnswerCheck, is_met: bool) -> None:
    assert check.is_met is is_met
