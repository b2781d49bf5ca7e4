from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.pair_template import PairTemplate
from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.replicas.encoder_calls import INLINE_DECODE_S
from deployments.tasks.base import DecodeContext
from deployments.tasks.text_classification import ClassificationOptions, TextClassification
from tests.support.artifacts import tiny_manifest

LABELS = ("NEGATIVE", "NEUTRAL", "POSITIVE")
MANIFEST = tiny_manifest(labels=LABELS)


def manifest(problem: str | None, labels: tuple[str, ...] = LABELS) -> ArtifactManifest:
    return MANIFEST.model_copy(update={"problem_type": problem, "labels": labels})


def decode_context(*logits: list[float]) -> DecodeContext:
    rows = [np.array(row, dtype=np.float32) for row in logits]
    return DecodeContext(rows=rows, items=(), token_offsets=(), manifest=MANIFEST)


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
def test_default_score_function_follows_the_problem_type(
    model: ArtifactManifest, function: str
) -> None:
    parse = TextClassification().parse
    assert parse("a", {}, model).options.function == function
    assert parse("a", {"function_to_apply": "none"}, model).options.function == "none"


@pytest.mark.parametrize("name", ["sigmoid", "Sigmoid", "SIGMOID"])
def test_score_function_may_have_any_case(name: str) -> None:
    parsed = TextClassification().parse("a", {"function_to_apply": name}, MANIFEST)
    assert parsed.options.function == "sigmoid"


@pytest.mark.parametrize(
    ("parameters", "top_k"), [({}, 3), ({"top_k": None}, 3), ({"top_k": 1}, 1), ({"top_k": 99}, 99)]
)
def test_top_k_is_all_labels_by_default(parameters: dict[str, Any], top_k: int) -> None:
    assert TextClassification().parse("a", parameters, MANIFEST).options.top_k == top_k


@pytest.mark.parametrize(
    ("inputs", "parameters", "error", "field"),
    [
        ("", {}, EmptyInput, "inputs"),
        (["a", ""], {}, EmptyInput, "inputs[1]"),
        ({"text_pair": "a"}, {}, InvalidField, "inputs.text"),
        ({"text": ""}, {}, EmptyInput, "inputs"),
        (["a", {"text": "", "text_pair": ""}], {}, EmptyInput, "inputs[1]"),
        (["a", {"text": 3}], {}, InvalidField, "inputs[1].text"),
        (3, {}, InvalidField, "inputs"),
        ("a", {"top_k": 0}, InvalidField, "parameters.top_k"),
        ("a", {"top_k": "1"}, InvalidField, "parameters.top_k"),
        ("a", {"function_to_apply": "argmax"}, InvalidField, "parameters.function_to_apply"),
        ("a", {"normalize": True}, UnknownParameter, "parameters.normalize"),
    ],
)
def test_invalid_request_is_rejected_with_its_path(
    inputs: Any, parameters: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as caught:
        TextClassification().parse(inputs, parameters, MANIFEST)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("inputs", "texts", "fields"),
    [
        ("a", ("a",), ("inputs",)),
        ({"text": "a"}, ("a",), ("inputs",)),
        ({"text": "a", "text_pair": None}, ("a",), ("inputs",)),
        ({"text": "a", "text_pair": "b"}, (("a", "b"),), ("inputs",)),
        ({"text": "a", "text_pair": ""}, (("a", ""),), ("inputs",)),
        ({"text": "", "text_pair": "b"}, (("", "b"),), ("inputs",)),
        (["a", {"text": "b", "text_pair": "c"}], ("a", ("b", "c")), ("inputs[0]", "inputs[1]")),
    ],
)
def test_items_are_texts_and_pairs(
    inputs: Any, texts: tuple[Any, ...], fields: tuple[str, ...]
) -> None:
    parsed = TextClassification().parse(inputs, {}, MANIFEST)
    assert (parsed.texts, parsed.fields) == (texts, fields)


@pytest.mark.parametrize(
    ("inputs", "parameters", "matches"),
    [
        ({"text": "a"}, {}, True),
        ([{"text": "a", "text_pair": "b"}], {}, True),
        ("a", {"function_to_apply": "none"}, True),
        ("a", {"top_k": 2}, False),  # other tasks have `top_k` too
        (["a"], {}, False),
        ([], {}, False),
        ({"question": "a"}, {}, False),
    ],
)
def test_task_matches_pairs_and_its_parameters(
    inputs: Any, parameters: dict[str, Any], matches: bool
) -> None:
    assert TextClassification().matches(inputs, parameters) is matches


def classify(options: ClassificationOptions, *logits: list[float]) -> list[list[str]]:
    decoded = TextClassification().decode(decode_context(*logits), options)
    return [[entry["label"] for entry in entries] for entries in decoded]


def test_each_text_has_a_list_with_the_best_label_first() -> None:
    options = ClassificationOptions(top_k=3, function="softmax")
    assert classify(options, [1, 3, 2], [9, 0, 5]) == [
        ["NEUTRAL", "POSITIVE", "NEGATIVE"],
        ["NEGATIVE", "POSITIVE", "NEUTRAL"],
    ]


def test_equal_scores_have_label_order() -> None:
    assert classify(ClassificationOptions(3, "none"), [5, 5, 5]) == [list(LABELS)]


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (2, 2), (99, 3)])
def test_top_k_limits_labels(top_k: int, count: int) -> None:
    (labels,) = classify(ClassificationOptions(top_k, "softmax"), [1, 3, 2])
    assert labels == ["NEUTRAL", "POSITIVE", "NEGATIVE"][:count]


def test_scores_are_python_floats() -> None:
    options = ClassificationOptions(top_k=3, function="softmax")
    ((best, *_),) = TextClassification().decode(decode_context([0, np.log(3), -1000]), options)
    assert type(best["score"]) is float
    assert best == {"label": "NEUTRAL", "score": pytest.approx(0.75, abs=1e-6)}


def test_many_labels_are_predicted_to_take_long() -> None:
    labels = tuple(f"label {n}" for n in range(28))

    def predict_s(texts: int, top_k: int) -> float:
        rows = np.zeros((texts, len(labels)), np.float32)
        context = DecodeContext(
            rows=rows, items=(), token_offsets=(), manifest=manifest(None, labels)
        )
        return TextClassification().predict_decode_s(
            context, ClassificationOptions(top_k, "softmax")
        )

    assert predict_s(1, 28) < predict_s(1_024, 1) < INLINE_DECODE_S < predict_s(1_024, 28)


def test_model_with_a_text_for_pairs_classifies_only_pairs() -> None:
    template = PairTemplate(before_first="Q: ", before_second=" D: ", end="")
    model = tiny_manifest(labels=("SCORE",)).model_copy(update={"pair_template": template})
    pair = {"text": "what?", "text_pair": "this"}
    assert TextClassification().parse(pair, {}, model).texts == (("what?", "this"),)
    with pytest.raises(InvalidField, match="a query and a document") as caught:
        TextClassification().parse([pair, "what?"], {}, model)
    assert caught.value.field == "inputs[1]"
