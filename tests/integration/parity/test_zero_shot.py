"""Zero-shot classification equals the pipeline of transformers on the same weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.artifacts.types import TaskName
from tests.support.parity_models import ParityModel, agreement
from tests.support.parity_texts import varied_texts

NLI = ("contradiction", "neutral", "entailment")
CANDIDATES = ("film", "the city at night", "東京", "crème brûlée")
TEXTS = 220
READS = 64  # maximum tokens of the model, three of them special
LONGEST_HYPOTHESIS = 24  # maximum tokens of a hypothesis made from TEMPLATES and CANDIDATES
TEMPLATES = (None, "{}", "It was a {{good}} day for {0}, and the train is lovely!")
TOLERANCE = 1e-5  # for probabilities
# If the probabilities of entailment and contradiction differ by less, int8 may decide either way.
DECIDED_GAP = 0.1
INT8_AGREEMENT = 0.98  # minimum share of equal decisions, among those above DECIDED_GAP


@pytest.fixture(scope="module")
def parity_model(tmp_path_factory: pytest.TempPathFactory) -> ParityModel:
    root = tmp_path_factory.mktemp("entailment")
    return ParityModel.make(root, TaskName.ZERO_SHOT_CLASSIFICATION, labels=NLI)


@pytest.fixture(scope="module")
def reference(parity_model: ParityModel) -> Any:
    return create_pipeline(parity_model)


def create_pipeline(parity_model: ParityModel) -> Any:
    pipeline = parity_model.pipeline()
    pipeline.tokenizer.model_max_length = READS
    return pipeline


@pytest.fixture(scope="module")
def texts(parity_model: ParityModel) -> list[str]:
    return varied_texts(parity_model.checkpoint, TEXTS, max_tokens=READS - 3 - LONGEST_HYPOTHESIS)


def build_parameters(
    candidates: Sequence[str], multi_label: bool, template: str | None
) -> dict[str, Any]:
    """Build parameters that the server and the pipeline both accept."""
    parameters = {"candidate_labels": list(candidates), "multi_label": multi_label}
    return parameters if template is None else {**parameters, "hypothesis_template": template}


def assert_same(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Assert scores within the tolerance, and equal order of labels with different scores."""
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert our["sequence"] == their["sequence"]
        due = scores_by_label(their)
        assert scores_by_label(our) == pytest.approx(due, abs=TOLERANCE)
        # Labels with different scores in the pipeline must not have the opposite order.
        assert all(due[a] > due[b] - 2 * TOLERANCE for a, b in pairwise(our["labels"]))
        assert our["scores"] == sorted(our["scores"], reverse=True)
    clear = [i for i, their in enumerate(theirs) if smallest_gap(their) > 2 * TOLERANCE]
    assert len(clear) >= 0.95 * len(theirs), "too many near-ties to speak of an order"
    orders = [[answers[i]["labels"] for i in clear] for answers in (ours, theirs)]
    assert agreement(*orders) == 1


def scores_by_label(answer: Any) -> dict[str, float]:
    return dict(zip(answer["labels"], answer["scores"], strict=True))


def smallest_gap(answer: Any) -> float:
    """Return the smallest difference between adjacent scores."""
    return min((a - b for a, b in pairwise(answer["scores"])), default=1.0)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("multi_label", [False, True])
async def test_labels_equal_the_pipeline(
    multi_label: bool,
    template: str | None,
    parity_model: ParityModel,
    reference: Any,
    texts: list[str],
) -> None:
    parameters = build_parameters(CANDIDATES, multi_label, template)
    theirs = reference(texts, **parameters)
    async with parity_model.serving() as served:
        assert_same(await served.alone(texts, parameters), theirs)
        assert_same(await served.mixed(texts, parameters), theirs)


@pytest.mark.parametrize("multi_label", [False, True])
async def test_single_label_equals_the_pipeline(
    multi_label: bool, parity_model: ParityModel, reference: Any, texts: list[str]
) -> None:
    parameters = build_parameters(CANDIDATES[:1], multi_label, None)
    theirs = reference(texts, **parameters)
    assert len({round(answer["scores"][0], 3) for answer in theirs}) > 20
    async with parity_model.serving() as served:
        assert_same(await served.mixed(texts, parameters), theirs)


@pytest.mark.parametrize(
    "labels", [NLI[::-1], ("neutral", "Entailment", "no"), ("ENTAIL", "not_entailment")], ids=str
)
async def test_other_label_names_and_orders_equal_the_pipeline(
    labels: tuple[str, ...], tmp_path: Path, texts: list[str]
) -> None:
    parity_model = ParityModel.make(tmp_path, TaskName.ZERO_SHOT_CLASSIFICATION, labels=labels)
    reference = create_pipeline(parity_model)
    async with parity_model.serving() as served:
        for multi_label in (False, True):
            parameters = build_parameters(CANDIDATES, multi_label, None)
            theirs = reference(texts[:40], **parameters)
            assert_same(await served.mixed(texts[:40], parameters), theirs)


async def test_labels_with_commas_equal_the_pipeline(
    parity_model: ParityModel, reference: Any, texts: list[str]
) -> None:
    parameters = {
        "candidate_labels": " film,crème brûlée , the city at night,",
        "multi_label": True,
    }
    theirs = reference(texts[:40], **parameters)
    async with parity_model.serving() as served:
        assert_same(await served.mixed(texts[:40], parameters), theirs)


async def test_truncated_texts_equal_the_pipeline(
    parity_model: ParityModel, reference: Any
) -> None:
    long_texts = varied_texts(
        parity_model.checkpoint, TEXTS, min_tokens=READS, max_tokens=3 * READS, seed=1
    )
    parameters = build_parameters(CANDIDATES, False, None)
    theirs = reference(long_texts, **parameters)
    async with parity_model.serving() as served:
        assert_same(await served.mixed(long_texts, parameters), theirs)


async def test_different_labels_per_request_equal_the_pipeline(
    parity_model: ParityModel, reference: Any, texts: list[str]
) -> None:
    rng = random.Random(0)
    async with parity_model.serving() as served:
        for text in texts[:40]:
            candidates = rng.sample(CANDIDATES, rng.randint(2, len(CANDIDATES)))
            parameters = build_parameters(candidates, rng.random() < 0.5, rng.choice(TEMPLATES))
            assert_same([await served.ask(text, parameters)], [reference(text, **parameters)])


async def test_int8_decisions_agree_with_the_pipeline(
    parity_model: ParityModel, reference: Any, texts: list[str]
) -> None:
    parameters = build_parameters(CANDIDATES, True, None)
    theirs = reference(texts, **parameters)
    async with parity_model.serving("int8") as served:
        ours = await served.mixed(texts, parameters)
    due, found = (
        np.array([[scores_by_label(answer)[label] for label in CANDIDATES] for answer in side])
        for side in (theirs, ours)
    )
    decided = np.abs(2 * due - 1) > DECIDED_GAP  # `due` is entailment, 1 - `due` contradiction
    assert decided.mean() > 0.5
    assert ((due > 0.5) == (found > 0.5))[decided].mean() >= INT8_AGREEMENT
