"""text-classification equals the pipeline of transformers on the same weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deployments.artifacts.types import TaskName
from tests.integration.parity.conftest import LABELS
from tests.support.parity_models import ParityModel, ServedModel, agreement, decided
from tests.support.parity_texts import pair_texts, varied_texts

INPUTS = 300
# TOLERANCE is for scores, because the two sides add float32 numbers in different orders. For logits
# the tolerance is ten times higher, because logits reach 10.
TOLERANCE = 2e-6
LOGIT_TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def pipeline(classifier: ParityModel) -> Any:
    return classifier.pipeline()


@pytest.fixture(scope="module")
def texts(classifier: ParityModel) -> list[str]:
    return varied_texts(classifier.checkpoint, INPUTS, max_tokens=62)


@pytest.fixture(scope="module")
def pairs(classifier: ParityModel) -> list[dict[str, str]]:
    """Pairs of texts that together have at most the model's maximum length."""
    return pair_texts(varied_texts(classifier.checkpoint, 2 * 200, max_tokens=30, seed=1))


@pytest.fixture(scope="module")
def expected(pipeline: Any, texts: list[str]) -> list[Any]:
    answers: list[Any] = pipeline(texts, top_k=None)
    return answers


@pytest.fixture
async def app(classifier: ParityModel) -> AsyncIterator[ServedModel]:
    async with classifier.serving() as served:
        yield served


def assert_same(ours: list[Any], theirs: list[Any], tolerance: float = TOLERANCE) -> None:
    """Assert the same labels in the same order for each text, with scores within the tolerance."""
    assert [[entry["label"] for entry in one] for one in ours] == [
        [entry["label"] for entry in one] for one in theirs
    ]
    for our, their in zip(ours, theirs, strict=True):
        assert [entry["score"] for entry in our] == pytest.approx(
            [entry["score"] for entry in their], abs=tolerance
        )


async def test_single_texts_equal_the_pipeline(
    app: ServedModel, texts: list[str], expected: list[Any]
) -> None:
    assert {answer[0]["label"] for answer in expected} == set(LABELS)
    # For one text, clients expect a list with one answer.
    assert_same([answer for (answer,) in await app.alone(texts)], expected)


async def test_batched_texts_equal_the_pipeline(
    app: ServedModel, texts: list[str], expected: list[Any]
) -> None:
    assert_same(await app.mixed(texts), expected)


@pytest.mark.parametrize("top_k", [1, 2, 3, 7])
async def test_top_k_equals_the_pipeline(
    app: ServedModel, pipeline: Any, texts: list[str], top_k: int
) -> None:
    few = texts[:40]
    assert_same(await app.mixed(few, {"top_k": top_k}), pipeline(few, top_k=top_k))


@pytest.mark.parametrize("function", ["sigmoid", "softmax", "none"])
async def test_function_to_apply_equals_the_pipeline(
    app: ServedModel, pipeline: Any, texts: list[str], function: str
) -> None:
    theirs = pipeline(texts, top_k=None, function_to_apply=function)
    tolerance = LOGIT_TOLERANCE if function == "none" else TOLERANCE
    ours = await app.mixed(texts, {"function_to_apply": function})
    assert_same(ours, theirs, tolerance)


async def test_pairs_equal_the_pipeline(
    app: ServedModel, pipeline: Any, pairs: list[dict[str, str]]
) -> None:
    expected = [pipeline(pair, top_k=None) for pair in pairs]
    assert len(pairs) == 200
    assert_same([answer for (answer,) in await app.alone(pairs)], expected)
    assert_same(await app.mixed(pairs), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_input_names": ["input_ids", "attention_mask"]},
        {"tokenizer_class": "TokenizersBackend", "model_input_names": None},
    ],
    ids=["stated", "class"],
)
async def test_pairs_of_a_tokenizer_without_segment_types_equal_the_pipeline(
    settings: dict[str, Any], pairs: list[dict[str, str]], tmp_path: Path
) -> None:
    model = ParityModel.make(tmp_path, TaskName.TEXT_CLASSIFICATION, labels=LABELS, **settings)
    pipeline = model.pipeline()
    assert "token_type_ids" not in pipeline.tokenizer("a", "b")
    async with model.serving() as app:
        ours = await app.mixed(pairs[:40])
    assert_same(ours, [pipeline(pair, top_k=None) for pair in pairs[:40]])


async def test_mixed_texts_and_pairs_equal_the_pipeline(
    app: ServedModel, pipeline: Any, texts: list[str], pairs: list[dict[str, str]]
) -> None:
    both = [one for pair in zip(texts[:30], pairs[:30], strict=True) for one in pair]
    expected = [
        pipeline({"text": one} if isinstance(one, str) else one, top_k=None) for one in both
    ]
    assert_same(await app.mixed(both), expected)


async def test_int8_labels_agree_with_the_pipeline(
    classifier: ParityModel, texts: list[str], expected: list[Any]
) -> None:
    """Require 98 % equal labels for texts with a clear best label, and 95 % for all texts.

    With random weights, some leads are as small as int8's rounding error.
    """
    async with classifier.serving("int8") as app:
        alone = [answer for (answer,) in await app.alone(texts)]
        mixed = await app.mixed(texts)
    decided_indices = decided(expected)
    assert len(decided_indices) >= 200
    for answers in (alone, mixed):
        ours, theirs = ([best[0]["label"] for best in each] for each in (answers, expected))
        assert agreement(ours, theirs) >= 0.95
        assert (
            agreement([ours[i] for i in decided_indices], [theirs[i] for i in decided_indices])
            >= 0.98
        )
