"""Answers equal those recorded by `reference_answers` from transformers 4."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.artifacts.store import file_sha256
from deployments.artifacts.types import TaskName
from tests.integration.parity.reference_answers import (
    LONG_RUNS,
    RECORD,
    SHORT_RUNS,
    WEIGHTS,
    make_questions,
)
from tests.support.parity_models import ParityModel, agreement

TOLERANCE = 1e-5  # for scores
INT8_AGREEMENT = 0.98  # minimum share of equal best answers, among those with a clear lead
RUNS = [parameters for _, parameters in SHORT_RUNS] + list(LONG_RUNS)
RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def parity_model(tmp_path_factory: pytest.TempPathFactory) -> ParityModel:
    parity_model = ParityModel.make(
        tmp_path_factory.mktemp("questions"), TaskName.QUESTION_ANSWERING
    )
    digest = file_sha256(parity_model.checkpoint / WEIGHTS)
    assert digest == RECORDED["weights"], "the checkpoint has changed: record its answers again"
    return parity_model


def recorded(run: int) -> tuple[list[dict[str, str]], list[list[list[float]]]]:
    """Return the questions of a run, and for each the pipeline's answers [score, start, end]."""
    answers = RECORDED["runs"][run]["answers"]
    return [RECORDED["questions"][int(i)] for i in answers], list(answers.values())


def as_list(answer: Any) -> list[dict[str, Any]]:
    return answer if isinstance(answer, list) else [answer]


def assert_same(questions: Any, ours: list[Any], theirs: list[list[list[float]]]) -> None:
    for asked, answer, expected in zip(questions, ours, theirs, strict=True):
        # A single answer is an object instead of a list.
        assert isinstance(answer, dict) is (len(expected) == 1)
        found = as_list(answer)
        assert [[a["start"], a["end"]] for a in found] == [span for _, *span in expected]
        assert [a["score"] for a in found] == pytest.approx(
            [score for score, *_ in expected], abs=TOLERANCE
        )
        assert [a["answer"] for a in found] == [
            asked["context"][a["start"] : a["end"]] for a in found
        ]


def test_record_has_all_runs_and_enough_questions() -> None:
    assert [run["parameters"] for run in RECORDED["runs"]] == RUNS
    assert RECORDED["transformers"].startswith("4.57.")
    asked = {i for run in RECORDED["runs"] for i in run["answers"]}
    assert len(asked) >= 200
    contexts = "".join(question["context"] for question in RECORDED["questions"])
    assert all(sample in contexts for sample in ("👩‍🚀", "東京", "crème", "e\u0301"))


@pytest.mark.parametrize("run", range(len(RUNS)), ids=lambda run: json.dumps(RUNS[run]))
async def test_answers_equal_the_record(run: int, parity_model: ParityModel) -> None:
    questions, theirs = recorded(run)
    assert len(theirs) >= 20
    async with parity_model.serving() as served:
        assert_same(questions, await served.alone(questions, RUNS[run]), theirs)
        assert_same(questions, await served.mixed(questions, RUNS[run]), theirs)


async def test_lists_of_questions_and_contexts_equal_the_record(parity_model: ParityModel) -> None:
    questions, theirs = recorded(0)
    combined = {
        key: [question[key] for question in questions[:50]] for key in ("question", "context")
    }
    async with parity_model.serving() as served:
        assert_same(questions[:50], await served.ask(combined), theirs[:50])


@pytest.mark.slow
async def test_int8_answers_agree_with_fp32(parity_model: ParityModel) -> None:
    """fp32 is the reference, because the tests above compare it with the pipeline.

    With random weights the scores of spans are a few hundredths, and most leads are as small as
    int8's rounding error. INT8_AGREEMENT applies only to answers that lead by 0.01.
    """
    questions = make_questions(parity_model.checkpoint, 1_200, seed=5)
    async with parity_model.serving() as served:
        exact = [as_list(answer) for answer in await served.mixed(questions, {"top_k": 2})]
    async with parity_model.serving("int8") as served:
        ours = await served.mixed(questions)
    clear = [i for i, answers in enumerate(exact) if score_gap(answers) >= 0.01]
    assert len(clear) >= 200
    texts = [answer["answer"] for answer in ours]
    expected = [answers[0]["answer"] for answers in exact]
    assert agreement(texts, expected) >= 0.8
    assert agreement([texts[i] for i in clear], [expected[i] for i in clear]) >= INT8_AGREEMENT


def score_gap(answers: list[dict[str, Any]]) -> float:
    """Return the score difference of the best two answers."""
    scores = [answer["score"] for answer in answers] + [0.0]
    return float(scores[0] - scores[1])
