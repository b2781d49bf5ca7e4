from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.manifest import ArtifactManifest
from deployments.tasks.text_classification import (
    SCORES,
    ClassificationOptions,
    TextClassification,
)
from tests.sealed import tiny_manifest

LABELS = ("NEGATIVE", "NEUTRAL", "POSITIVE")
MANIFEST = tiny_manifest(labels=LABELS)


def manifest(problem: str | None, labels: tuple[str, ...] = LABELS) -> ArtifactManifest:
    return MANIFEST.model_copy(update={"problem": problem, "labels": labels})


@pytest.mark.parametrize(
    ("function", "logits", "scores"),
    [
        # e^0 : e^ln3 = 1 : 3
        ("softmax", [0.0, np.log(3)], [0.25, 0.75]),
        ("softmax", [1000.0, 1000.0], [0.5, 0.5]),
        ("softmax", [-1000.0, 1000.0], [0.0, 1.0]),
        # 1 / (1 + e^-ln3) = 3/4
        ("sigmoid", [0.0, np.log(3)], [0.5, 0.75]),
        ("sigmoid", [-1000.0, 1000.0], [0.0, 1.0]),
        ("none", [-2.5, 7.0], [-2.5, 7.0]),
    ],
)
def test_scores_are_what_the_textbook_says_without_overflow(
    function: str, logits: list[float], scores: list[float]
) -> None:
    with np.errstate(over="raise", invalid="raise"):
        computed = SCORES[function](np.array([logits], dtype=np.float32))
    assert computed == pytest.approx(np.array([scores]), abs=1e-6)
    assert computed.dtype == np.float32


@pytest.mark.parametrize(
    ("model", "function"),
    [
        (manifest("single_label"), "softmax"),
        (manifest(None), "softmax"),
        (manifest("multi_label"), "sigmoid"),
        (manifest("single_label", labels=("SPAM",)), "sigmoid"),
        (manifest("regression"), "none"),
        (manifest("regression", labels=("STARS",)), "none"),
    ],
)
def test_the_models_own_kind_of_problem_decides_the_function(
    model: ArtifactManifest, function: str
) -> None:
    parse = TextClassification().parse
    assert parse("a", {}, model).options.function == function
    assert parse("a", {"function_to_apply": "none"}, model).options.function == "none"


@pytest.mark.parametrize(
    ("parameters", "top_k"), [({}, 3), ({"top_k": None}, 3), ({"top_k": 1}, 1), ({"top_k": 99}, 99)]
)
def test_all_labels_come_unless_fewer_are_asked_for(parameters: dict[str, Any], top_k: int) -> None:
    assert TextClassification().parse("a", parameters, MANIFEST).options.top_k == top_k


@pytest.mark.parametrize(
    ("inputs", "parameters", "error", "field"),
    [
        ("", {}, EmptyInput, "inputs"),
        (["a", ""], {}, EmptyInput, "inputs[1]"),
        ({"text": "a"}, {}, InvalidField, "inputs"),
        ("a", {"top_k": 0}, InvalidField, "parameters.top_k"),
        ("a", {"top_k": "1"}, InvalidField, "parameters.top_k"),
        ("a", {"function_to_apply": "argmax"}, InvalidField, "parameters.function_to_apply"),
        ("a", {"normalize": True}, UnknownParameter, "parameters.normalize"),
    ],
)
def test_what_cannot_be_classified_is_refused_by_name(
    inputs: Any, parameters: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        TextClassification().parse(inputs, parameters, MANIFEST)
    assert refusal.value.field == field


def labelled(options: ClassificationOptions, *logits: list[float]) -> list[list[str]]:
    rows = np.array(logits, dtype=np.float32)
    decoded = TextClassification().decode(rows, options, MANIFEST)
    return [[entry["label"] for entry in entries] for entries in decoded]


def test_every_text_has_its_own_list_with_the_best_label_first() -> None:
    options = ClassificationOptions(top_k=3, function="softmax")
    assert labelled(options, [1, 3, 2], [9, 0, 5]) == [
        ["NEUTRAL", "POSITIVE", "NEGATIVE"],
        ["NEGATIVE", "POSITIVE", "NEUTRAL"],
    ]


def test_equal_scores_come_in_label_order() -> None:
    assert labelled(ClassificationOptions(3, "none"), [5, 5, 5]) == [list(LABELS)]


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (2, 2), (99, 3)])
def test_no_more_labels_come_than_asked_for(top_k: int, count: int) -> None:
    (labels,) = labelled(ClassificationOptions(top_k, "softmax"), [1, 3, 2])
    assert labels == ["NEUTRAL", "POSITIVE", "NEGATIVE"][:count]


def test_scores_are_plain_numbers_for_the_wire() -> None:
    rows = np.array([[0, np.log(3), -1000]], dtype=np.float32)
    ((best, *_),) = TextClassification().decode(
        rows, ClassificationOptions(top_k=3, function="softmax"), MANIFEST
    )
    assert type(best["score"]) is float
    assert best == {"label": "NEUTRAL", "score": pytest.approx(0.75, abs=1e-6)}
