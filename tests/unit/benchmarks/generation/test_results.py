from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.generation.results import (
    EIGHT_TO_ONE,
    NO_DRAFTS_TO_GENAI,
    ONE_TO_GENAI,
    ONE_TO_TRANSFORMERS,
    SERVED_TO_LOOP,
    AnswerAgreement,
    GenerationResults,
    RatioTable,
    SystemResult,
    describe,
    evaluate_goals,
    name_streams,
    require_correct,
)
from benchmarks.generation.scenarios import JOINING_TTFT, RUNNING_INTER_TOKEN_MAX, ChurnResults
from benchmarks.generation.streams import (
    DECODE,
    GENAI,
    IN_PROCESS,
    NO_DRAFTS,
    OVER_HTTP,
    THROUGHPUT,
    StreamResult,
)
from benchmarks.generation.structured_output import SchemaResults
from tests.support.benchmark_generation import answer

CLEAN = ChurnResults(
    requests=10,
    disconnected=4,
    compared=6,
    different=0,
    still_active=0,
    still_waiting=0,
    resident_bytes_before=100_000_000,
    resident_bytes_after=102_500_000,
    seconds=1.5,
)
SCHEMAS = SchemaResults(
    requests=50,
    valid=49,
    truncated=1,
    invalid=0,
    rejected=0,
    answer_ms={"p50": 800.0, "p90": 1_500.0, "p95": 1_600.0, "p99": 1_700.0},
    tokens=2_500,
    seconds=12.5,
    faults=("quiz_1 is truncated: after 200 tokens: '...'",),
)


def level(streams: int, system: str, *rates: float) -> SystemResult:
    rounds = [{DECODE: rate, THROUGHPUT: rate / 2} for rate in rates]
    return SystemResult.summarize(name_streams(streams), system, rounds)


STREAM_RESULTS = (
    level(1, IN_PROCESS, 200.0, 100.0, 220.0),
    level(1, NO_DRAFTS, 160.0, 80.0, 176.0),
    level(1, GENAI, 200.0, 100.0, 200.0),
    level(8, IN_PROCESS, 600.0, 250.0, 616.0),
    level(8, OVER_HTTP, 480.0, 225.0, 450.0),
)
JOINS = (
    SystemResult.summarize(
        "long-prompt",
        IN_PROCESS,
        [{RUNNING_INTER_TOKEN_MAX: 90.0, JOINING_TTFT: 1.0}, {RUNNING_INTER_TOKEN_MAX: 251.0}],
    ),
    SystemResult.summarize(
        "long-prompt",
        OVER_HTTP,
        [{RUNNING_INTER_TOKEN_MAX: 200.0}, {RUNNING_INTER_TOKEN_MAX: 240.0}],
    ),
)


def build_results(**changed: object) -> GenerationResults:
    table = RatioTable((*STREAM_RESULTS, *JOINS))
    results = GenerationResults(
        model_id="org/model",
        version="0123",
        compute_type="cpu-int4",
        threads=2,
        prompt_tokens=64,
        new_tokens=32,
        streams=STREAM_RESULTS,
        scenarios=JOINS,
        churn=CLEAN,
        structured_output=SCHEMAS,
        batch_invariance=AnswerAgreement("batched", 3, 3, 32.0, must_be_equal=True),
        answer_agreements=(AnswerAgreement("baseline", 4, 1, 7.25),),
        notes=("other weights",),
        packages={},
        missing={"llama.cpp": "no GGUF file"},
        ratios=table.ratios(),
        goals=evaluate_goals(table, table.ratios(), CLEAN, SCHEMAS),
    )
    return replace(results, **changed)


def test_summarize_drops_metrics_missing_in_a_round() -> None:
    assert set(JOINS[0].metrics) == {RUNNING_INTER_TOKEN_MAX}
    assert JOINS[0].metrics[RUNNING_INTER_TOKEN_MAX].values == (90.0, 251.0)


def test_ratios_divide_round_by_round() -> None:
    ratios = RatioTable(STREAM_RESULTS).ratios()
    assert ratios[ONE_TO_GENAI].values == (1.0, 1.0, 1.1)
    assert ratios[EIGHT_TO_ONE].values == pytest.approx((3.75, 3.125, 3.5))
    assert ratios[NO_DRAFTS_TO_GENAI].values == pytest.approx((0.8, 0.8, 0.88))
    assert ratios[SERVED_TO_LOOP].values == pytest.approx((0.8, 0.9, 450 / 616))
    assert ONE_TO_TRANSFORMERS not in ratios


def test_ratios_require_equal_numbers_of_rounds() -> None:
    cut_short = RatioTable((STREAM_RESULTS[0], level(1, GENAI, 200.0)))
    assert ONE_TO_GENAI not in cut_short.ratios()


def test_a_system_with_other_answers_has_no_ratio() -> None:
    ratios = RatioTable(STREAM_RESULTS, {GENAI, OVER_HTTP}).ratios()
    assert set(ratios) == {EIGHT_TO_ONE}


@pytest.mark.parametrize(
    ("agreement", "is_comparable"),
    [
        (AnswerAgreement("other weights", 4, 0, 1.0), True),
        (AnswerAgreement("another prompt", 4, 0, 0.75), False),
        (AnswerAgreement("another version over HTTP", 4, 4, None), False),
        (AnswerAgreement("the same version over HTTP", 4, 4, None, must_be_equal=True), True),
        (AnswerAgreement("without drafts", 4, 3, 60.0, must_be_equal=True), False),
    ],
)
def test_ratios_need_comparable_answers(agreement: AnswerAgreement, is_comparable: bool) -> None:
    assert agreement.is_comparable is is_comparable


def test_goals_use_median_ratios_and_worst_latencies() -> None:
    values = {goal.what: (goal.value, goal.reached) for goal in build_results().goals}
    assert values[ONE_TO_GENAI] == (1.0, True)
    assert values[EIGHT_TO_ONE] == (pytest.approx(3.5), True)
    assert values[ONE_TO_TRANSFORMERS] == (None, None)
    waits = [values[what] for what in values if "during the prefill of a long prompt" in what]
    assert waits == [(251.0, False), (240.0, True)]
    assert values["memory growth after churn, MB"] == (2.5, True)
    assert values["valid answers to 50 schemas"] == (49, False)


def test_compare_counts_equal_leading_tokens() -> None:
    one, other = answer([1.0] * 3, ids=(1, 2, 3)), answer([1.0] * 3, ids=(1, 9, 3))
    agreement = AnswerAgreement.compare("a beside b", [(one, one), (one, other)])
    assert (agreement.compared, agreement.same, agreement.leading_tokens) == (2, 1, 2.0)


def test_compare_without_token_ids_uses_texts() -> None:
    in_process = answer([1.0])._replace(text="Hello")
    agreement = AnswerAgreement.compare(
        "a beside b", [(in_process, StreamResult(0.0, (1.0,), 1, text="Hello"))]
    )
    assert (agreement.same, agreement.leading_tokens) == (1, None)
    assert agreement.sentence == "a beside b: 1 of 1 answers are equal"


def test_describe_lists_all_results() -> None:
    text = describe(build_results())
    assert "org/model 0123 cpu-int4, 2 threads, prompts of 64 tokens, answers of 32" in text
    assert "churn: 10 requests in 1.5 s, 4 disconnected; 0 of 6 answers wrong, +2.5 MB" in text
    assert "schemas: 49 of 50 answers valid, 1 truncated, 0 invalid, 0 rejected; " in text
    assert "; 0.80 s per answer, p95 1.60 s, 200.0 tokens/s\nquiz_1 is truncated: after" in text
    assert "baseline: 1 of 4 answers are equal, 7.2 equal leading tokens on average" in text
    assert "note: other weights" in text
    assert "skipped: llama.cpp: no GGUF file" in text
    assert "eight streams / one stream without drafts: 3.500, at least 2.7: reached" in text


def test_require_correct_accepts_correct_results() -> None:
    require_correct(build_results())
    require_correct(build_results(batch_invariance=None, churn=None, structured_output=None))


@pytest.mark.parametrize(
    ("changed", "values"),
    [
        (
            {"batch_invariance": AnswerAgreement("ours", 3, 2, 20.0, must_be_equal=True)},
            "ours: 2 of 3 answers are equal",
        ),
        (
            {"answer_agreements": (AnswerAgreement("served", 3, 0, None, must_be_equal=True),)},
            "served: 0 of 3 answers are equal",
        ),
        ({"churn": replace(CLEAN, still_active=1)}, "1 KV slots are in use"),
        ({"churn": replace(CLEAN, still_waiting=2)}, "2 requests wait"),
        ({"churn": replace(CLEAN, different=3)}, "3 of 6 answers are wrong"),
        (
            {"structured_output": replace(SCHEMAS, invalid=2)},
            "2 of 50 answers violate their schema",
        ),
    ],
)
def test_require_correct_rejects_wrong_answers_and_leaks(
    changed: dict[str, object], values: str
) -> None:
    with pytest.raises(BenchmarkError, match=values):
        require_correct(build_results(**changed))
