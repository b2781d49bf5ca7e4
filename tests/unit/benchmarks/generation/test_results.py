from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.generation.results import (
    EIGHT_TO_ONE,
    ONE_TO_GENAI,
    ONE_TO_TRANSFORMERS,
    SERVED_TO_LOOP,
    UNDRAFTED_TO_GENAI,
    AnswerAgreement,
    GenerationResults,
    RatioTable,
    SystemResult,
    describe,
    evaluate_goals,
    require_correct,
    streams_part,
)
from benchmarks.generation.scenarios import JOIN_FIRST, JOIN_GAP, ChurnResults
from benchmarks.generation.streams import (
    DECODE,
    GENAI,
    IN_PROCESS,
    NO_DRAFTS,
    OVER_HTTP,
    WHOLE,
    StreamResult,
)
from benchmarks.generation.structured_output import SchemaResults
from tests.support.benchmark_generation import answer

CLEAN = ChurnResults(
    requests=10,
    left=4,
    compared=6,
    different=0,
    still_active=0,
    still_waiting=0,
    resident_bytes_before=100_000_000,
    resident_bytes_after=102_500_000,
    seconds=1.5,
)
FILLED = SchemaResults(
    asked=50,
    valid=49,
    cut=1,
    wrong=0,
    refused=0,
    answer_ms={"p50": 800.0, "p90": 1_500.0, "p95": 1_600.0, "p99": 1_700.0},
    tokens=2_500,
    seconds=12.5,
    faults=("quiz_1 is cut short: after 200 tokens: '...'",),
)


def level(streams: int, contender: str, *rates: float) -> SystemResult:
    rounds = [{DECODE: rate, WHOLE: rate / 2} for rate in rates]
    return SystemResult.of(streams_part(streams), contender, rounds)


STREAM_PARTS = (
    level(1, IN_PROCESS, 200.0, 100.0, 220.0),
    level(1, NO_DRAFTS, 160.0, 80.0, 176.0),
    level(1, GENAI, 200.0, 100.0, 200.0),
    level(8, IN_PROCESS, 600.0, 250.0, 616.0),
    level(8, OVER_HTTP, 480.0, 225.0, 450.0),
)
JOINS = (
    SystemResult.of("join", IN_PROCESS, [{JOIN_GAP: 90.0, JOIN_FIRST: 1.0}, {JOIN_GAP: 251.0}]),
    SystemResult.of("join", OVER_HTTP, [{JOIN_GAP: 200.0}, {JOIN_GAP: 240.0}]),
)


def figures(**changed: object) -> GenerationResults:
    monitor = RatioTable((*STREAM_PARTS, *JOINS))
    whole = GenerationResults(
        model_id="org/model",
        version="0123",
        compute_type="cpu-int4",
        threads=2,
        prompt_tokens=64,
        new_tokens=32,
        levels=STREAM_PARTS,
        scenarios=JOINS,
        churn=CLEAN,
        schemas=FILLED,
        alone=AnswerAgreement("ours alone", 3, 3, 32.0),
        answer_agreements=(AnswerAgreement("theirs", 4, 1, 7.25),),
        notes=("other weights",),
        packages={},
        missing={"llama.cpp": "no GGUF file"},
        ratios=monitor.ratios(),
        goals=evaluate_goals(monitor, monitor.ratios(), CLEAN, FILLED),
    )
    return replace(whole, **changed)


def test_a_figure_that_a_round_lacks_is_left_out() -> None:
    assert set(JOINS[0].figures) == {JOIN_GAP}
    assert JOINS[0].figures[JOIN_GAP].values == (90.0, 251.0)


def test_ratios_are_taken_round_by_round() -> None:
    ratios = RatioTable(STREAM_PARTS).ratios()
    assert ratios[ONE_TO_GENAI].values == (1.0, 1.0, 1.1)
    assert ratios[EIGHT_TO_ONE].values == pytest.approx((3.75, 3.125, 3.5))
    assert ratios[UNDRAFTED_TO_GENAI].values == pytest.approx((0.8, 0.8, 0.88))
    assert ratios[SERVED_TO_LOOP].values == pytest.approx((0.8, 0.9, 450 / 616))
    assert ONE_TO_TRANSFORMERS not in ratios


def test_who_was_not_there_to_the_end_is_not_compared() -> None:
    cut_short = RatioTable((STREAM_PARTS[0], level(1, GENAI, 200.0)))
    assert ONE_TO_GENAI not in cut_short.ratios()


def test_goals_take_the_median_ratio_and_the_worst_wait() -> None:
    told = {goal.what: (goal.value, goal.reached) for goal in figures().goals}
    assert told[ONE_TO_GENAI] == (1.0, True)
    assert told[EIGHT_TO_ONE] == (pytest.approx(3.5), True)
    assert told[ONE_TO_TRANSFORMERS] == (None, None)
    waits = [told[what] for what in told if "waits while a long prompt joins" in what]
    assert waits == [(251.0, False), (240.0, True)]
    assert told["MB that churn leaves behind"] == (2.5, True)
    assert told["valid answers to 50 JSON schemas"] == (49, False)


def test_answers_are_alike_up_to_the_first_difference() -> None:
    one, other = answer([1.0] * 3, ids=(1, 2, 3)), answer([1.0] * 3, ids=(1, 9, 3))
    found = AnswerAgreement.of("a beside b", [(one, one), (one, other)])
    assert (found.compared, found.same, found.leading_tokens) == (2, 1, 2.0)


def test_where_no_tokens_are_told_texts_are_compared() -> None:
    ours = answer([1.0])._replace(text="Hello")
    found = AnswerAgreement.of("a beside b", [(ours, StreamResult(0.0, (1.0,), 1, text="Hello"))])
    assert (found.same, found.leading_tokens) == (1, None)
    assert found.sentence == "a beside b: 1 of 1 answers are the same"


def test_all_of_it_is_told() -> None:
    text = describe(figures())
    assert "org/model 0123 cpu-int4, 2 threads, prompts of 64 tokens, answers of 32" in text
    assert "churn: 10 requests in 1.5 s, 4 left; 0 of 6 answers wrong, +2.5 MB" in text
    assert "schemas: 49 of 50 answers valid, 1 cut short, 0 wrong, 0 refused; " in text
    assert "; 0.80 s an answer, p95 1.60 s, 200.0 tokens/s\nquiz_1 is cut short: after" in text
    assert "theirs: 1 of 4 answers are the same, 7.2 leading tokens on average" in text
    assert "note: other weights" in text
    assert "llama.cpp was not measured, or not to the end: no GGUF file" in text
    assert "eight streams / one stream without drafts: 3.500, at least 2.7: reached" in text


def test_right_answers_pass() -> None:
    require_correct(figures())
    require_correct(figures(alone=None, churn=None, schemas=None))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"alone": AnswerAgreement("ours", 3, 2, 20.0)}, "ours: 2 of 3 answers are the same"),
        ({"churn": replace(CLEAN, still_active=1)}, "1 rows are in use"),
        ({"churn": replace(CLEAN, still_waiting=2)}, "2 requests wait"),
        ({"churn": replace(CLEAN, different=3)}, "3 of 6 answers are wrong"),
        ({"schemas": replace(FILLED, wrong=2)}, "2 of 50 answers break their schemas"),
    ],
)
def test_wrong_answers_and_leaks_fail_the_run(changed: dict[str, object], told: str) -> None:
    with pytest.raises(BenchmarkError, match=told):
        require_correct(figures(**changed))
