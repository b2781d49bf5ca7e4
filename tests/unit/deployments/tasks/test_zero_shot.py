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
def test_it_takes_a_classifier_that_judges_entailment(labels: tuple[str, ...], fits: bool) -> None:
    assert TASK.fits(tiny_manifest(labels=labels)) is fits


@pytest.mark.parametrize(
    ("parameters", "claims"),
    [({"candidate_labels": "a,b"}, True), ({"candidate_labels": None}, False), ({}, False)],
)
def test_a_body_with_candidate_labels_is_meant_for_it(
    parameters: dict[str, Any], claims: bool
) -> None:
    assert TASK.matches("text", parameters) is claims


def test_every_text_meets_every_hypothesis() -> None:
    parsed = TASK.parse(["one", "two"], {"candidate_labels": ["sport", "art"]}, MANIFEST)
    assert parsed.texts == (
        ("one", "This example is sport."),
        ("one", "This example is art."),
        ("two", "This example is sport."),
        ("two", "This example is art."),
    )
    assert parsed.fields == ("inputs[0]", "inputs[0]", "inputs[1]", "inputs[1]")


def test_with_one_text_the_labels_are_what_is_many() -> None:
    parsed = TASK.parse("one", {"candidate_labels": ["sport", "art"]}, MANIFEST)
    assert parsed.texts == (("one", "This example is sport."), ("one", "This example is art."))
    assert parsed.fields == ("inputs", "inputs")
    assert parsed.many == LABELS


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        (["sport", " art "], ("sport", " art ")),
        ("sport, art ,music", ("sport", "art", "music")),
        ("sport,,", ("sport",)),
        (["a, b"], ("a, b",)),
        (["same", "same"], ("same", "same")),
    ],
)
def test_labels_are_a_list_or_one_string_with_commas(given: Any, labels: tuple[str, ...]) -> None:
    assert TASK.parse("a", {"candidate_labels": given}, MANIFEST).options.labels == labels


@pytest.mark.parametrize(
    ("template", "hypothesis"),
    [
        ("{}", "art"),
        ("about {0}!", "about art!"),
        ("{{}} is {}", "{} is art"),
        (None, "This example is art."),
    ],
)
def test_the_template_becomes_a_hypothesis(template: str | None, hypothesis: str) -> None:
    parameters = {"candidate_labels": "art", "hypothesis_template": template}
    assert TASK.parse("a", parameters, MANIFEST).texts == (("a", hypothesis),)


def test_a_label_is_never_read_as_a_template() -> None:
    assert TASK.parse("a", {"candidate_labels": ["{0.x} {}"]}, MANIFEST).texts == (
        ("a", "This example is {0.x} {}."),
    )


@pytest.mark.parametrize(
    "template", ["", "no place", "{} {}", "{1}", "{label}", "{", "{0.__class__}", "{0[0]}", "{!r}"]
)
def test_a_template_with_anything_but_one_placeholder_is_refused(template: str) -> None:
    parameters = {"candidate_labels": "art", "hypothesis_template": template}
    with pytest.raises(InvalidField, match=r"must contain one placeholder `\{\}`") as refusal:
        TASK.parse("a", parameters, MANIFEST)
    assert refusal.value.field == TEMPLATE


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
        # A width that a formatter would fill with 10 GB of blanks.
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
def test_what_cannot_be_classified_is_refused_by_name(
    inputs: Any, parameters: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        TASK.parse(inputs, parameters, MANIFEST)
    assert refusal.value.field == field


def test_a_list_of_wrong_labels_is_refused_at_the_first() -> None:
    with pytest.raises(ValidationError) as refusal:
        ZeroShotParameters.model_validate({"candidate_labels": [7] * 100})
    assert refusal.value.error_count() == 1


def test_texts_times_labels_are_bounded_before_they_are_paired() -> None:
    texts = ["a"] * 100_000
    with pytest.raises(TooManyItems, match="10000000000 pairs") as refusal:
        TASK.parse(texts, {"candidate_labels": texts}, MANIFEST)
    assert refusal.value.field == LABELS
    most = TASK.parse(["a"] * 2, {"candidate_labels": ["a"] * (MAX_PAIRS // 2)}, MANIFEST)
    assert len(most.texts) == len(most.fields) == MAX_PAIRS


@pytest.mark.parametrize(
    ("parameters", "truncation"),
    [
        ({}, Truncation.KEEP_START),
        ({"truncate": None}, Truncation.KEEP_START),
        ({"truncate": True, "truncation_direction": "Left"}, Truncation.KEEP_END),
        ({"truncate": False}, Truncation.REFUSE),
    ],
)
def test_long_texts_are_cut_unless_forbidden(
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
def test_labels_compete_unless_several_may_hold_or_there_is_but_one(
    parameters: dict[str, Any], independent: bool
) -> None:
    parsed = TASK.parse("a", {"candidate_labels": "x,y", **parameters}, MANIFEST)
    assert parsed.options.independent is independent


@pytest.mark.parametrize(
    ("labels", "independent", "scores"),
    [
        # e^0 : e^ln3 = 1 : 3 between the candidates; each of them 3 : 1 against contradiction.
        (NLI, False, [0.25, 0.75]),
        (NLI, True, [0.75, 0.75]),
        # Where entailment comes first, contradiction is the last label, else the first.
        (("entailment", "neutral", "contradiction"), False, [0.25, 0.75]),
        (("entailment", "neutral", "contradiction"), True, [0.25, 0.25]),
        (("neutral", "ENTAIL", "contradiction"), False, [0.5, 0.5]),
        (("neutral", "ENTAIL", "contradiction"), True, [1.0, 1.0]),
    ],
)
def test_scores_are_what_the_textbook_says_without_overflow(
    labels: tuple[str, ...], independent: bool, scores: list[float]
) -> None:
    ln3 = np.log(3)
    logits = np.array([[[-ln3, 1000, 0], [0, 1000, ln3]]], dtype=np.float32)
    with np.errstate(over="raise", invalid="raise"):
        computed = compute_label_scores(logits, labels, independent=independent)
    assert computed == pytest.approx(np.array([scores]), abs=1e-6)


def decoded(
    options: ZeroShotOptions, *logits: list[float], manifest: ArtifactManifest = MANIFEST
) -> Any:
    rows = [np.array(row, dtype=np.float32) for row in logits]
    return TASK.decode(
        DecodeContext(rows=rows, items=(), token_offsets=(), manifest=manifest), options
    )


def test_one_text_is_answered_by_an_object_with_the_best_label_first() -> None:
    options = ZeroShotOptions(("one",), ("sport", "art", "food"), independent=False, single=True)
    answer = decoded(options, [0, 0, 0], [0, 0, np.log(6)], [0, 0, np.log(3)])
    assert answer == {
        "sequence": "one",
        "labels": ["art", "food", "sport"],
        "scores": pytest.approx([0.6, 0.3, 0.1], abs=1e-6),
    }
    assert {type(score) for score in answer["scores"]} == {float}
    TypeAdapter(ZeroShotClassification.response_type).validate_python(answer, strict=True)


def test_a_list_is_answered_text_by_text_even_a_list_of_one() -> None:
    two = ZeroShotOptions(("one", "two"), ("sport", "art"), independent=True, single=False)
    answer = decoded(two, [0, 9, 5], [0, 9, 1], [4, 9, 0], [0, 9, 4])
    assert [(entry["sequence"], entry["labels"]) for entry in answer] == [
        ("one", ["sport", "art"]),
        ("two", ["art", "sport"]),
    ]
    one = two._replace(sequences=("one",))
    assert decoded(one, [0, 9, 5], [0, 9, 1]) == answer[:1]


def test_equal_scores_come_in_the_order_of_the_request() -> None:
    options = ZeroShotOptions(("one",), ("c", "a", "b"), independent=False, single=True)
    assert decoded(options, [1, 2, 3], [3, 2, 3], [0, 0, 3])["labels"] == ["c", "a", "b"]
