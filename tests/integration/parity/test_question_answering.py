"""Answers as the last question-answering pipeline gave them (`record_question_answering`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.artifacts.store import file_sha256
from deployments.artifacts.types import TaskName
from tests.integration.parity.record_question_answering import (
    FOR_LONG,
    FOR_SHORT,
    RECORD,
    WEIGHTS,
    questions_for,
)
from tests.support.parity_models import ParityModel, agreement

TOLERANCE = 1e-5  # of a score
INT8_AGREEMENT = 0.98  # of best answers with a clear lead
RUNS = [parameters for _, parameters in FOR_SHORT] + list(FOR_LONG)
RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> ParityModel:
    twins = ParityModel.make(tmp_path_factory.mktemp("questions"), TaskName.QUESTION_ANSWERING)
    digest = file_sha256(twins.checkpoint / WEIGHTS)
    assert digest == RECORDED["weights"], "the checkpoint has changed: record its answers again"
    return twins


def recorded(run: int) -> tuple[list[dict[str, str]], list[list[list[float]]]]:
    """The questions of a run, and the pipeline's answers to each: [score, start, end]."""
    answers = RECORDED["runs"][run]["answers"]
    return [RECORDED["questions"][int(i)] for i in answers], list(answers.values())


def as_list(answer: Any) -> list[dict[str, Any]]:
    return answer if isinstance(answer, list) else [answer]


def assert_same(questions: Any, ours: list[Any], theirs: list[list[list[float]]]) -> None:
    for asked, answer, expected in zip(questions, ours, theirs, strict=True):
        # One answer is an object.
        assert isinstance(answer, dict) is (len(expected) == 1)
        found = as_list(answer)
        assert [[a["start"], a["end"]] for a in found] == [span for _, *span in expected]
        assert [a["score"] for a in found] == pytest.approx(
            [score for score, *_ in expected], abs=TOLERANCE
        )
        assert [a["answer"] for a in found] == [
            asked["context"][a["start"] : a["end"]] for a in found
        ]


def test_the_record_is_of_all_that_is_compared() -> None:
    assert [run["parameters"] for run in RECORDED["runs"]] == RUNS
    assert RECORDED["transformers"].startswith("4.57.")
    asked = {i for run in RECORDED["runs"] for i in run["answers"]}
    assert len(asked) >= 200
    contexts = "".join(question["context"] for question in RECORDED["questions"])
    assert all(sample in contexts for sample in ("👩‍🚀", "東京", "crème", "e\u0301"))


@pytest.mark.parametrize("run", range(len(RUNS)), ids=lambda run: json.dumps(RUNS[run]))
async def test_answers_are_the_pipelines_alone_and_in_company(run: int, twins: ParityModel) -> None:
    questions, theirs = recorded(run)
    assert len(theirs) >= 20
    async with twins.serving() as served:
        assert_same(questions, await served.alone(questions, RUNS[run]), theirs)
        assert_same(questions, await served.mixed(questions, RUNS[run]), theirs)


async def test_lists_inside_both_keys_are_answered_alike(twins: ParityModel) -> None:
    questions, theirs = recorded(0)
    together = {
        key: [question[key] for question in questions[:50]] for key in ("question", "context")
    }
    async with twins.serving() as served:
        assert_same(questions[:50], await served.ask(together), theirs[:50])


@pytest.mark.slow
async def test_int8_finds_the_same_answers(twins: ParityModel) -> None:
    """Against fp32, which the tests above hold to the pipeline.

    With random weights a span's score is hundredths, and most leads are as small as int8's noise:
    asked for is the share of answers that lead by one hundredth, and enough of these.
    """
    questions = questions_for(twins.checkpoint, 1_200, seed=5)
    async with twins.serving() as served:
        exact = [as_list(answer) for answer in await served.mixed(questions, {"top_k": 2})]
    async with twins.serving("int8") as served:
        ours = await served.mixed(questions)
    sure = [i for i, answers in enumerate(exact) if lead(answers) >= 0.01]
    assert len(sure) >= 200
    texts = [answer["answer"] for answer in ours]
    right = [answers[0]["answer"] for answers in exact]
    assert agreement(texts, right) >= 0.8
    assert agreement([texts[i] for i in sure], [right[i] for i in sure]) >= INT8_AGREEMENT


def lead(answers: list[dict[str, Any]]) -> float:
    """Of the best answer over the next one."""
    scores = [answer["score"] for answer in answers] + [0.0]
    return float(scores[0] - scores[1])
