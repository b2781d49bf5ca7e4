from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from deployments.artifacts.manifest import ArtifactManifest
from deployments.errors import (
    EmptyInput,
    InvalidField,
    ServeError,
    TooManyItems,
    UnknownParameter,
)
from deployments.messages import Truncation
from deployments.tasks.base import DecodeContext
from deployments.tasks.zero_shot import (
    MAX_PAIRS,
    MAX_TEMPLATE_CHARACTERS,
    ZeroShotClassification,
    ZeroShotOptions,
    ZeroShotParameters,
    compute_label_scores,
)
from tests.support.artifacts import tiny_manifest

TASK = ZeroShotClassification()
NLI = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
MANIFEST = tiny_manifest(labels=NLI)
LABELS = "parameters.candidate_labels"
TEMPLATE = "parameters.hypothesis_template"


@pytest.mark.parametrize(
    ("labels", "fits"),
    [
        (NLI, True),
        (("Entailment", "not_entailment"), True),
        (("no", "entails"), True),
        (("NEGATIVE", "POSITIVE"), False),
        (("not_entailment", "contradiction"), False),
        (("entailment",), False),
        ((), False),  # an embedding model
    ],
)
def test_task_fits_classifiers_with_an_entailment_label(
    labels: tuple[str, ...], fits: bool
) -> None:
    assert TASK.fits(tiny_manifest(labels=labels)) is fits


@pytest.mark.parametrize(
    ("parameters", "matches"),
    [({"candidate_labels": "a,b"}, True), ({"candidate_labels": None}, False), ({}, False)],
)
def test_task_matches_candidate_labels(parameters: dict[str, Any], matches: bool) -> None:
    assert TASK.matches("text", parameters) is matches


def test_items_are_pairs_of_every_text_and_hypothesis() -> None:
    parsed = TASK.parse(["one", "two"], {"candidate_labels": ["sport", "art"]}, MANIFEST)
    assert parsed.texts == (
        ("one", "This example is sport."),
        ("one", "This example is art."),
        ("two", "This example is sport."),
        ("two", "This example is art."),
    )
    assert parsed.fields == ("inputs[0]", "inputs[0]", "inputs[1]", "inputs[1]")


def test_single_text_counts_the_labels() -> None:
    parsed = TASK.parse("one", {"candidate_labels": ["sport", "art"]}, MANIFEST)
    assert parsed.texts == (("one", "This example is sport."), ("one", "This example is art."))
    assert parsed.fields == ("inputs", "inputs")
    assert parsed.many == LABELS


@pytest.mark.parametrize(
    ("sent", "labels"),
    [
        (["sport", " art "], ("sport", " art ")),
        ("sport, art ,music", ("sport", "art", "music")),
        ("sport,,", ("sport",)),
        (["a, b"], ("a, b",)),
        (["same", "same"], ("same", "same")),
    ],
)
def test_labels_are_a_list_or_a_string_with_commas(sent: Any, labels: tuple[str, ...]) -> None:
    assert TASK.parse("a", {"candidate_labels": sent}, MANIFEST).options.labels == labels


@pytest.mark.parametrize(
    ("template", "hypothesis"),
    [
        ("{}", "art"),
        ("about {0}!", "about art!"),
        ("{{}} is {}", "{} is art"),
        (None, "This example is art."),
    ],
)
def test_template_with_label_is_the_hypothesis(template: str | None, hypothesis: str) -> None:
    parameters = {"candidate_labels": "art", "hypothesis_template": template}
    assert TASK.parse("a", parameters, MANIFEST).texts == (("a", hypothesis),)


def test_label_is_not_formatted() -> None:
    assert TASK.parse("a", {"candidate_labels": ["{0.x} {}"]}, MANIFEST).texts == (
        ("a", "This example is {0.x} {}."),
    )


@pytest.mark.parametrize(
    "template", ["", "no place", "{} {}", "{1}", "{label}", "{", "{0.__class__}", "{0[0]}", "{!r}"]
)
def test_template_without_exactly_one_placeholder_is_rejected(template: str) -> None:
    parameters = {"candidate_labels": "art", "hypothesis_template": template}
    with pytest.raises(InvalidField, match=r"must contain one placeholder `\{\}`") as caught:
        TASK.parse("a", parameters, MANIFEST)
    assert caught.value.field == TEMPLATE


@pytest.mark.parametrize(
    ("inputs", "parameters", "error", "field"),
    [
        ("a", {}, InvalidField, LABELS),
        ("a", {"candidate_labels": None}, InvalidField, LABELS),
        ("a", {"candidate_labels": 7}, InvalidField, LABELS),
        ("a", {"candidate_labels": ["x", 7]}, InvalidField, f"{LABELS}[1]"),
        ("a", {"candidate_labels": []}, EmptyInput, LABELS),
        ("a", {"candidate_labels": " , "}, EmptyInput, LABELS),
        ("a", {"candidate_labels": ["x", ""]}, EmptyInput, f"{LABELS}[1]"),
        ("a", {"candidate_labels": "x", "multi_label": 1}, InvalidField, "parameters.multi_label"),
        ("a", {"candidate_labels": "x", "top_k": 1}, UnknownParameter, "parameters.top_k"),
        ("", {"candidate_labels": "x"}, EmptyInput, "inputs"),
        (["a", ""], {"candidate_labels": "x"}, EmptyInput, "inputs[1]"),
        ({"sequences": "a"}, {"candidate_labels": "x"}, InvalidField, "inputs"),
        # str.format would pad the label to this width with 10 GB of spaces.
        (
            "a",
            {"candidate_labels": "x", "hypothesis_template": "{:>9999999999}"},
            InvalidField,
            TEMPLATE,
        ),
        (
            "a",
            {
                "candidate_labels": "x",
                "hypothesis_template": "{}" + "x" * MAX_TEMPLATE_CHARACTERS,
            },
            InvalidField,
            TEMPLATE,
        ),
    ],
)
def test_invalid_request_is_rejected_with_its_path(
    inputs: Any, parameters: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as caught:
        TASK.parse(inputs, parameters, MANIFEST)
    assert caught.value.field == field


def test_list_of_invalid_labels_has_one_error() -> None:
    with pytest.raises(ValidationError) as caught:
        ZeroShotParameters.model_validate({"candidate_labels": [7] * 100})
    assert caught.value.error_count() == 1


def test_too_many_pairs_are_rejected() -> None:
    texts = ["a"] * 100_000
    with pytest.raises(TooManyItems, match="10000000000 pairs") as caught:
        TASK.parse(texts, {"candidate_labels": texts}, MANIFEST)
    assert caught.value.field == LABELS
    largest = TASK.parse(["a"] * 2, {"candidate_labels": ["a"] * (MAX_PAIRS // 2)}, MANIFEST)
    assert len(largest.texts) == len(largest.fields) == MAX_PAIRS


@pytest.mark.parametrize(
    ("parameters", "truncation"),
    [
        ({}, Truncation.KEEP_START),
        ({"truncate": None}, Truncation.KEEP_START),
        ({"truncate": True, "truncation_direction": "Left"}, Truncation.KEEP_END),
        ({"truncate": False}, Truncation.REFUSE),
    ],
)
def test_long_texts_are_truncated_by_default(
    parameters: dict[str, Any], truncation: Truncation
) -> None:
    parsed = TASK.parse("a", {"candidate_labels": "x", **parameters}, MANIFEST)
    assert parsed.truncation is truncation


@pytest.mark.parametrize(
    ("parameters", "independent"),
    [
        ({}, False),
        ({"multi_label": True}, True),
        ({"multi_class": True}, True),
        ({"multi_class": True, "multi_label": None}, True),
        ({"multi_class": True, "multi_label": False}, False),
        ({"candidate_labels": "alone"}, True),
    ],
)
def test_labels_are_independent_with_multi_label_or_a_single_label(
    parameters: dict[str, Any], independent: bool
) -> None:
    parsed = TASK.parse("a", {"candidate_labels": "x,y", **parameters}, MANIFEST)
    assert parsed.options.independent is independent


@pytest.mark.parametrize(
    ("labels", "independent", "scores"),
    [
        # Entailment of the two candidates is 1 : 3. Entailment to contradiction is 3 : 1 for both.
        (NLI, False, [0.25, 0.75]),
        (NLI, True, [0.75, 0.75]),
        # The first label counts as contradiction; if it is entailment, the last label does.
        (("entailment", "neutral", "contradiction"), False, [0.25, 0.75]),
        (("entailment", "neutral", "contradiction"), True, [0.25, 0.25]),
        (("neutral", "ENTAIL", "contradiction"), False, [0.5, 0.5]),
        (("neutral", "ENTAIL", "contradiction"), True, [1.0, 1.0]),
    ],
)
def test_label_scores_are_exact_and_do_not_overflow(
    labels: tuple[str, ...], independent: bool, scores: list[float]
) -> None:
    ln3 = np.log(3)
    logits = np.array([[[-ln3, 1000, 0], [0, 1000, ln3]]], dtype=np.float32)
    with np.errstate(over="raise", invalid="raise"):
        computed = compute_label_scores(logits, labels, independent=independent)
    assert computed == pytest.approx(np.array([scores]), abs=1e-6)


def decode(
    options: ZeroShotOptions, *logits: list[float], manifest: ArtifactManifest = MANIFEST
) -> Any:
    rows = [np.array(row, dtype=np.float32) for row in logits]
    return TASK.decode(
        DecodeContext(rows=rows, items=(), token_offsets=(), manifest=manifest), options
    )


def test_single_text_returns_an_object_with_the_best_label_first() -> None:
    options = ZeroShotOptions(("one",), ("sport", "art", "food"), independent=False, single=True)
    answer = decode(options, [0, 0, 0], [0, 0, np.log(6)], [0, 0, np.log(3)])
    assert answer == {
        "sequence": "one",
        "labels": ["art", "food", "sport"],
        "scores": pytest.approx([0.6, 0.3, 0.1], abs=1e-6),
    }
    assert {type(score) for score in answer["scores"]} == {float}
    TypeAdapter(ZeroShotClassification.response_type).validate_python(answer, strict=True)


def test_list_of_texts_returns_a_list() -> None:
    two = ZeroShotOptions(("one", "two"), ("sport", "art"), independent=True, single=False)
    answer = decode(two, [0, 9, 5], [0, 9, 1], [4, 9, 0], [0, 9, 4])
    assert [(entry["sequence"], entry["labels"]) for entry in answer] == [
        ("one", ["sport", "art"]),
        ("two", ["art", "sport"]),
    ]
    one = two._replace(sequences=("one",))
    assert decode(one, [0, 9, 5], [0, 9, 1]) == answer[:1]


def test_equal_scores_have_request_order() -> None:
    options = ZeroShotOptions(("one",), ("c", "a", "b"), independent=False, single=True)
    assert decode(options, [1, 2, 3], [3, 2, 3], [0, 0, 3])["labels"] == ["c", "a", "b"]
