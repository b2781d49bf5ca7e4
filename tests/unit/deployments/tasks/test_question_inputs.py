"""Tests of question-answering inputs and parameters. test_question_answering tests responses."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.artifacts.types import TaskName
from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.messages import Windowing
from deployments.tasks import TASKS, find_tasks
from deployments.tasks.question_answering import (
    QuestionAnswering,
    QuestionParameters,
    build_question_windowing,
)
from tests.support.artifacts import tiny_manifest
from tests.unit.deployments.tasks.test_question_answering import MANIFEST, REQUEST

TASK = QuestionAnswering()


def test_defaults_are_those_of_transformers() -> None:
    parsed = TASK.parse(REQUEST, {"top_k": None}, MANIFEST)
    assert parsed.options.span_options == (1, 15, False, True)
    assert build_question_windowing(512) == Windowing(tokens=384, stride=128, first_tokens=64)
    assert build_question_windowing(200) == Windowing(tokens=200, stride=100, first_tokens=64)
    # By default too, a question takes at most half of a window.
    assert build_question_windowing(64) == Windowing(tokens=64, stride=32, first_tokens=32)


def test_windowing_follows_parameters_up_to_the_model_maximum() -> None:
    sent = {"max_seq_len": 40, "doc_stride": 0, "max_question_len": 7}
    assert TASK.parse(REQUEST, sent, MANIFEST).windowing == Windowing(40, 0, 7)
    # A question of 40 tokens would leave no space for the context.
    assert build_question_windowing(
        100, QuestionParameters(max_seq_len=40, max_question_len=40)
    ) == Windowing(tokens=40, stride=20, first_tokens=20)
    longest = TASK.parse(REQUEST, {"max_seq_len": 1_000}, MANIFEST).windowing
    assert longest == build_question_windowing(MANIFEST.max_tokens)


@pytest.mark.parametrize(
    ("parameters", "error", "field"),
    [
        ({"top_k": 0}, InvalidField, "parameters.top_k"),
        ({"top_k": 101}, InvalidField, "parameters.top_k"),
        ({"top_k": "2"}, InvalidField, "parameters.top_k"),
        ({"max_answer_len": 0}, InvalidField, "parameters.max_answer_len"),
        ({"max_question_len": 0}, InvalidField, "parameters.max_question_len"),
        ({"doc_stride": -1}, InvalidField, "parameters.doc_stride"),
        ({"doc_stride": 51, "max_seq_len": 50}, InvalidField, "parameters.doc_stride"),
        ({"doc_stride": 65}, InvalidField, "parameters.doc_stride"),
        ({"align_to_words": "no"}, InvalidField, "parameters.align_to_words"),
        ({"function_to_apply": "none"}, UnknownParameter, "parameters.function_to_apply"),
    ],
)
def test_invalid_parameter_is_rejected_with_its_path(
    parameters: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as caught:
        TASK.parse(REQUEST, parameters, MANIFEST)
    assert (caught.value.field, caught.value.status) == (
        field,
        422 if error is UnknownParameter else 400,
    )


@pytest.mark.parametrize(
    ("inputs", "error", "field"),
    [
        ("who", InvalidField, "inputs"),
        ([], EmptyInput, "inputs"),
        ([REQUEST, "who"], InvalidField, "inputs[1]"),
        ({"question": "who"}, InvalidField, "inputs.context"),
        ({"question": "who", "context": ""}, EmptyInput, "inputs.context"),
        ({"question": None, "context": "a"}, InvalidField, "inputs.question"),
        ([REQUEST, {"context": "a"}], InvalidField, "inputs[1].question"),
        ({"question": [], "context": "a"}, EmptyInput, "inputs.question"),
        ({"question": "who", "context": ["a"]}, InvalidField, "inputs.question"),
        ({"question": ["who", ""], "context": "a"}, EmptyInput, "inputs.question[1]"),
        ({"question": ["who"], "context": ["a", "b"]}, InvalidField, "inputs.context"),
    ],
)
def test_invalid_question_is_rejected_with_its_path(
    inputs: Any, error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as caught:
        TASK.parse(inputs, {}, MANIFEST)
    assert caught.value.field == field


def test_missing_context_has_the_message_of_hugging_face() -> None:
    with pytest.raises(InvalidField) as caught:
        TASK.parse({"question": "who"}, {}, MANIFEST)
    assert caught.value.message == "Error in `inputs.context`: field required"


def test_item_path_is_that_of_its_context() -> None:
    def fields(inputs: Any) -> tuple[str, ...]:
        return TASK.parse(inputs, {}, MANIFEST).fields

    assert fields(REQUEST) == ("inputs.context",)
    assert fields([REQUEST, REQUEST]) == ("inputs[0].context", "inputs[1].context")
    assert fields({"question": ["a", "b"], "context": "c"}) == ("inputs.context",) * 2
    batch = {"question": ["a", "b"], "context": ["c", "d"]}
    assert fields(batch) == ("inputs.context[0]", "inputs.context[1]")


def test_task_fits_only_span_models() -> None:
    assert TASKS[TaskName.QUESTION_ANSWERING].fits(MANIFEST)
    assert find_tasks(MANIFEST)[0] is TaskName.QUESTION_ANSWERING
    assert not TASK.fits(tiny_manifest())


@pytest.mark.parametrize(
    ("inputs", "matches"),
    [(REQUEST, True), ([REQUEST], True), ({"question": "a"}, True), ("a", False), ([], False)],
)
def test_task_matches_questions(inputs: Any, matches: bool) -> None:
    assert TASK.matches(inputs, {}) is matches
