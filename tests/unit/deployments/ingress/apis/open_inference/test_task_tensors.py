from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deployments.artifacts.types import TaskName
from deployments.errors import EmptyInput, InvalidField, ServeError
from deployments.ingress.apis.open_inference.task_tensors import (
    bind_tensors,
    detect_task_from_tensors,
    find_list_parameters,
    find_task_tensors,
)
from deployments.ingress.apis.open_inference.tensors import Tensor
from deployments.tasks import TASKS


def texts(name: str, *values: str, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(name, "BYTES", (len(values),) if shape is None else shape, list(values))


def bound(task: TaskName, *tensors: Tensor) -> Any:
    columns = bind_tensors(task, {tensor.name: tensor for tensor in tensors}).columns
    return find_task_tensors(task).to_inputs(columns)


def test_tensors_of_each_task_convert_to_valid_inputs() -> None:
    several = {
        TaskName.SENTENCE_SIMILARITY: {
            "source_sentence": "some source_sentence",
            "sentences": ["some sentences"],
        },
        TaskName.TEXT_CLASSIFICATION: [{"text": "some text", "text_pair": "some text_pair"}],
        TaskName.TEXT_RANKING: {"query": "some query", "texts": ["some texts"]},
        TaskName.QUESTION_ANSWERING: {"question": ["some question"], "context": ["some context"]},
    }
    for name, task in TASKS.items():
        form = find_task_tensors(name)
        inputs = form.to_inputs({spec.name: [f"some {spec.name}"] for spec in form.inputs})
        assert inputs == several.get(name, ["some text"])
        assert task.inputs.read(inputs)


def test_list_parameters_are_derived_from_types() -> None:
    assert find_list_parameters(TaskName.ZERO_SHOT_CLASSIFICATION) == {"candidate_labels"}
    assert find_list_parameters(TaskName.TOKEN_CLASSIFICATION) == {"ignore_labels"}
    assert find_list_parameters(TaskName.FILL_MASK) == {"targets"}
    assert find_list_parameters(TaskName.FEATURE_EXTRACTION) == set()


@pytest.mark.parametrize(
    "name", ["text", "args", "inputs", "input-0", "text_input", "text_inputs", "anything"]
)
@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2)])
def test_text_input_has_several_names(name: str, shape: tuple[int, ...]) -> None:
    tensor = texts(name, "a", "b", shape=shape)
    assert bound(TaskName.FEATURE_EXTRACTION, tensor) == ["a", "b"]
    assert bind_tensors(TaskName.FEATURE_EXTRACTION, {name: tensor}).text_name == name


def test_rows_convert_to_task_inputs() -> None:
    assert bound(TaskName.TEXT_CLASSIFICATION, texts("text", "a", "b")) == ["a", "b"]
    pairs = bound(TaskName.TEXT_CLASSIFICATION, texts("x", "a"), texts("text_pair", "b"))
    assert pairs == [{"text": "a", "text_pair": "b"}]
    ranking = bound(TaskName.TEXT_RANKING, texts("query", "q"), texts("texts", "a", "b"))
    assert ranking == {"query": "q", "texts": ["a", "b"]}
    similar = bound(
        TaskName.SENTENCE_SIMILARITY, texts("source_sentence", "s"), texts("sentences", "a", "b")
    )
    assert similar == {"source_sentence": "s", "sentences": ["a", "b"]}
    one_context = bound(
        TaskName.QUESTION_ANSWERING, texts("question", "q", "r"), texts("context", "c")
    )
    assert one_context == {"question": ["q", "r"], "context": ["c", "c"]}


def test_tensors_named_like_parameters_are_parameters() -> None:
    matches = bind_tensors(
        TaskName.ZERO_SHOT_CLASSIFICATION,
        {
            "text": texts("text", "a"),
            "candidate_labels": texts("candidate_labels", "x", "y", shape=(1, 2)),
            "multi_label": Tensor("multi_label", "BOOL", (1,), np.array([True])),
        },
    )
    assert matches.parameters == {"candidate_labels": ["x", "y"], "multi_label": True}
    assert type(matches.parameters["multi_label"]) is bool


@pytest.mark.parametrize(
    ("task", "tensors", "error", "field"),
    [
        (TaskName.FEATURE_EXTRACTION, [texts("a", "x"), texts("b", "y")], InvalidField, "text"),
        (TaskName.FEATURE_EXTRACTION, [texts("text", "x"), texts("b", "y")], InvalidField, "b"),
        (
            TaskName.FEATURE_EXTRACTION,
            [texts("text", "x"), texts("args", "y")],
            InvalidField,
            "args",
        ),
        (TaskName.FEATURE_EXTRACTION, [texts("text")], EmptyInput, "text"),
        (
            TaskName.FEATURE_EXTRACTION,
            [texts("text", *"abcd", shape=(2, 2))],
            InvalidField,
            "text",
        ),
        (
            TaskName.FEATURE_EXTRACTION,
            [Tensor("text", "INT64", (1,), np.array([7]))],
            InvalidField,
            "text",
        ),
        (
            TaskName.FEATURE_EXTRACTION,
            [texts("text", "x"), Tensor("dimensions", "INT64", (2,), np.array([7, 8]))],
            InvalidField,
            "dimensions",
        ),
        (TaskName.TEXT_CLASSIFICATION, [texts("text_pair", "x")], InvalidField, "text"),
        (
            TaskName.TEXT_CLASSIFICATION,
            [texts("text", "x", "y"), texts("text_pair", "z")],
            InvalidField,
            "text_pair",
        ),
        (TaskName.QUESTION_ANSWERING, [texts("text", "x")], InvalidField, "question"),
        (
            TaskName.QUESTION_ANSWERING,
            [texts("question", "q"), texts("context", "c", "d")],
            InvalidField,
            "context",
        ),
        (
            TaskName.TEXT_RANKING,
            [texts("query", "q", "r"), texts("texts", "c", "d")],
            InvalidField,
            "query",
        ),
    ],
)
def test_unknown_tensors_are_rejected_by_name(
    task: TaskName, tensors: list[Tensor], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as raised:
        bound(task, *tensors)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("names", "task"),
    [
        ({"text"}, None),
        ({"question"}, None),
        ({"query"}, None),
        ({"question", "context"}, TaskName.QUESTION_ANSWERING),
        ({"query", "texts"}, TaskName.TEXT_RANKING),
        ({"source_sentence", "sentences"}, TaskName.SENTENCE_SIMILARITY),
        ({"text", "candidate_labels"}, TaskName.ZERO_SHOT_CLASSIFICATION),
        ({"text", "text_pair"}, TaskName.TEXT_CLASSIFICATION),
    ],
)
def test_tensor_names_select_the_task(names: set[str], task: TaskName) -> None:
    assert detect_task_from_tensors(names) is task
