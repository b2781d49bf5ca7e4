from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest

from build_artifacts.evaluation import (
    BadEvaluationData,
    Evaluation,
    ExampleSampling,
    load_evaluation,
)
from build_artifacts.evaluation.question_answering import find_best_span
from deployments.artifacts.types import TaskName
from deployments.messages import TokenizedItem
from tests.unit.build_artifacts.evaluation.conftest import MakeModel, WriteFile

TASK = TaskName.QUESTION_ANSWERING
CONTEXT = "the night train to the city is good"
RIGHT = {"question": "that is good", "answers": [{"text": "Night train"}]}
IMPOSSIBLE = {"question": "was that for", "answers": [], "is_impossible": True}


def squad(*question_record: dict[str, Any], context: str = CONTEXT) -> str:
    paragraph = {"context": context, "qas": list(question_record)}
    return orjson.dumps({"data": [{"title": "t", "paragraphs": [paragraph]}]}).decode()


def span(item: TokenizedItem, first: int, last: int, no_answer: float = 0) -> np.ndarray:
    """Return logits with the best span at context tokens `first` to `last`; its score is 4."""
    logits = np.zeros((len(item.ids), 2), dtype=np.float32)
    logits[item.second_segment_start + first, 0] = logits[item.second_segment_start + last, 1] = 2
    logits[0] = no_answer / 2
    return logits


def load(text: str, write: WriteFile, make_model: MakeModel, **options: Any) -> Evaluation:
    return load_evaluation(write("squad.json", text), TASK, make_model(**options))


def test_best_span_is_the_answer(write: WriteFile, make_model: MakeModel) -> None:
    evaluation = load(squad(RIGHT), write, make_model)
    (item,) = evaluation.items
    assert (len(item.ids), item.second_segment_start) == (3 + 3 + 8, 5)
    assert evaluation.metric == "f1"
    assert evaluation.score([span(item, 1, 2)]) == {"f1": 1, "exact_match": 1}
    # "the night train" normalizes to the answer. "train to the city" normalizes to three words
    # and shares one of them with the two words of the answer.
    assert evaluation.score([span(item, 0, 2)]) == {"f1": 1, "exact_match": 1}
    assert evaluation.score([span(item, 2, 5)]) == {"f1": pytest.approx(0.4), "exact_match": 0}


def test_too_long_context_is_an_error_of_its_question(
    write: WriteFile, make_model: MakeModel
) -> None:
    text = squad(RIGHT, context=CONTEXT * 2_000)
    with pytest.raises(BadEvaluationData, match=r"json`, question 1: it has 1.* needs .* windows"):
        load(text, write, make_model, max_tokens=16)


def test_answer_excludes_question_and_special_tokens(
    write: WriteFile, make_model: MakeModel
) -> None:
    evaluation = load(squad(RIGHT), write, make_model)
    (item,) = evaluation.items
    logits = span(item, 1, 2)
    logits[[0, 1, 2, 3, 4, -1]] = 9
    assert evaluation.score([logits])["exact_match"] == 1


def test_data_without_unanswerable_questions_always_has_an_answer(
    write: WriteFile, make_model: MakeModel
) -> None:
    evaluation = load(squad(RIGHT), write, make_model)
    (item,) = evaluation.items
    assert evaluation.score([span(item, 1, 2, no_answer=50)])["exact_match"] == 1


def test_no_answer_is_allowed_with_unanswerable_questions(
    write: WriteFile, make_model: MakeModel
) -> None:
    evaluation = load(squad(RIGHT, IMPOSSIBLE), write, make_model)
    first, second = evaluation.items
    missed_answer = [span(first, 1, 2, no_answer=5), span(second, 0, 0, no_answer=5)]
    assert evaluation.score(missed_answer) == {
        "f1": 0.5,
        "exact_match": 0.5,
        "answerable_f1": 1,
        "answerable_exact_match": 1,
    }
    right = [span(first, 1, 2, no_answer=3), span(second, 0, 0, no_answer=5)]
    assert evaluation.score(right)["f1"] == 1
    false_answer = [span(first, 1, 2, no_answer=3), span(second, 1, 1, no_answer=3)]
    assert evaluation.score(false_answer)["f1"] == 0.5


def test_unanswerable_questions_alone_have_no_answerable_score(
    write: WriteFile, make_model: MakeModel
) -> None:
    evaluation = load(squad(IMPOSSIBLE), write, make_model)
    answers = [span(evaluation.items[0], 0, 0, no_answer=5)]
    assert evaluation.score(answers) == {"f1": 1, "exact_match": 1}


def windows_text(items: Sequence[TokenizedItem]) -> list[list[int]]:
    return [item.ids[item.second_segment_start : -1].tolist() for item in items]


def test_long_context_is_split_into_overlapping_windows(
    write: WriteFile, make_model: MakeModel
) -> None:
    context = "a b c d e f g h i j k l m n o p q r s t"
    question_record = {"question": "that is good", "answers": [{"text": "q r"}]}
    evaluation = load(squad(question_record, context=context), write, make_model, max_tokens=16)
    # 16 - 3 special tokens - 3 question tokens = 10 context tokens; 5 overlap.
    texts = windows_text(evaluation.items)
    assert [len(text) for text in texts] == [10, 10, 10]
    assert texts[0][5:] == texts[1][:5]
    assert texts[1][5:] == texts[2][:5]
    # The last window has the highest score; its tokens 6 and 7 are `q` and `r`.
    answers = [span(item, 0, 0) / 2 for item in evaluation.items]
    answers[2] = span(evaluation.items[2], 6, 7)
    assert evaluation.score(answers)["exact_match"] == 1


def test_window_with_lowest_no_answer_score_decides(
    write: WriteFile, make_model: MakeModel
) -> None:
    context = "a b c d e f g h i j k l m n o p q r s t"
    question_record = {"question": "that is good", "answers": [{"text": "q r"}]}
    evaluation = load(
        squad(question_record, IMPOSSIBLE, context=context), write, make_model, max_tokens=16
    )
    answers = [span(item, 0, 0, no_answer=9) * 0.8 for item in evaluation.items]
    answers[2] = span(evaluation.items[2], 6, 7, no_answer=1)
    assert evaluation.score(answers)["f1"] == 1


def test_long_question_leaves_room_for_context(write: WriteFile, make_model: MakeModel) -> None:
    question_record = {"question": "that is good " * 99, "answers": [{"text": "city"}]}
    evaluation = load(squad(question_record), write, make_model, max_tokens=16)
    assert {len(item.ids) for item in evaluation.items} == {16}
    assert {item.second_segment_start for item in evaluation.items} == {10}
    covered_tokens = {token for text in windows_text(evaluation.items) for token in text}
    assert len(covered_tokens) == len(set(CONTEXT.split()))


def test_sample_consists_of_questions(write: WriteFile, make_model: MakeModel) -> None:
    question_record = [{"question": "a " * n, "answers": [{"text": "city"}]} for n in range(1, 20)]
    path = write("squad.json", squad(*question_record))
    evaluation = load_evaluation(path, TASK, make_model(), ExampleSampling(limit=4, seed=5))
    assert (
        len({item.second_segment_start for item in evaluation.items}) == len(evaluation.items) == 4
    )


def test_span_has_ordered_ends_and_limited_length() -> None:
    start, end = np.zeros((2, 40), dtype=np.float32)
    start[35], end[2] = 9, 9
    assert find_best_span(start, end)[0] == 9
    start[:], end[:] = 0, 0
    start[3], end[32], end[33] = 1, 1, 5
    # Tokens 3 to 33 exceed the maximum of 30, so the end with score 5 gets another start.
    assert find_best_span(start, end) == (5.0, 33, 33)
    end[33] = 0
    assert find_best_span(start, end) == (2.0, 3, 32)


def test_no_tokens_have_no_span() -> None:
    nothing = np.zeros(0, dtype=np.float32)
    assert find_best_span(nothing, nothing)[0] == -np.inf
