"""What a question-answering request may be; `test_question_answering` has the answers."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.artifacts.types import TaskName
from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.messages import Windowing
from deployments.tasks import TASKS, find_tasks
from deployments.tasks.question_answering import QuestionAnswering, build_question_windowing
from tests.support.artifacts import tiny_manifest
from tests.unit.deployments.tasks.test_question_answering import ASKED, MANIFEST

TASK = QuestionAnswering()


def test_defaults_are_those_of_the_pipeline() -> None:
    work = TASK.parse(ASKED, {"top_k": None}, MANIFEST)
    assert work.options.span_options == (1, 15, False, True)
    assert build_question_windowing(512) == Windowing(tokens=384, stride=128, first_tokens=64)
    assert build_question_windowing(200) == Windowing(tokens=200, stride=100, first_tokens=64)
    # Of a short window a question takes half at most, unless a limit is set.
    assert build_question_windowing(64) == Windowing(tokens=64, stride=32, first_tokens=32)


def test_windows_are_as_asked_for_but_never_longer_than_the_model_reads() -> None:
    given = {"max_seq_len": 40, "doc_stride": 0, "max_question_len": 7}
    assert TASK.parse(ASKED, given, MANIFEST).windowing == Windowing(40, 0, 7)
    longest = TASK.parse(ASKED, {"max_seq_len": 1_000}, MANIFEST).windowing
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
def test_parameters_that_make_no_sense_are_refused_by_name(
    parameters: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        TASK.parse(ASKED, parameters, MANIFEST)
    assert (refusal.value.field, refusal.value.status) == (
        field,
        422 if error is UnknownParameter else 400,
    )


@pytest.mark.parametrize(
    ("inputs", "error", "field"),
    [
        ("who", InvalidField, "inputs"),
        ([], EmptyInput, "inputs"),
        ([ASKED, "who"], InvalidField, "inputs[1]"),
        ({"question": "who"}, InvalidField, "inputs.context"),
        ({"question": "who", "context": ""}, EmptyInput, "inputs.context"),
        ({"question": None, "context": "a"}, InvalidField, "inputs.question"),
        ([ASKED, {"context": "a"}], InvalidField, "inputs[1].question"),
        ({"question": [], "context": "a"}, EmptyInput, "inputs.question"),
        ({"question": "who", "context": ["a"]}, InvalidField, "inputs.question"),
        ({"question": ["who", ""], "context": "a"}, EmptyInput, "inputs.question[1]"),
        ({"question": ["who"], "context": ["a", "b"]}, InvalidField, "inputs.context"),
    ],
)
def test_what_is_no_question_is_refused_by_name(
    inputs: Any, error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        TASK.parse(inputs, {}, MANIFEST)
    assert refusal.value.field == field


def test_a_missing_context_is_told_in_the_words_clients_know() -> None:
    with pytest.raises(InvalidField) as refusal:
        TASK.parse({"question": "who"}, {}, MANIFEST)
    assert refusal.value.message == "Error in `inputs.context`: field required"


def test_items_are_named_by_the_path_of_their_context() -> None:
    def fields(inputs: Any) -> tuple[str, ...]:
        return TASK.parse(inputs, {}, MANIFEST).fields

    assert fields(ASKED) == ("inputs.context",)
    assert fields([ASKED, ASKED]) == ("inputs[0].context", "inputs[1].context")
    assert fields({"question": ["a", "b"], "context": "c"}) == ("inputs.context",) * 2
    together = {"question": ["a", "b"], "context": ["c", "d"]}
    assert fields(together) == ("inputs.context[0]", "inputs.context[1]")


def test_models_that_answer_spans_are_asked_questions() -> None:
    assert TASKS[TaskName.QUESTION_ANSWERING].fits(MANIFEST)
    assert find_tasks(MANIFEST)[0] is TaskName.QUESTION_ANSWERING
    assert not TASK.fits(tiny_manifest())


@pytest.mark.parametrize(
    ("inputs", "meant"),
    [(ASKED, True), ([ASKED], True), ({"question": "a"}, True), ("a", False), ([], False)],
)
def test_a_question_is_known_when_seen(inputs: Any, meant: bool) -> None:
    assert TASK.matches(inputs, {}) is meant
