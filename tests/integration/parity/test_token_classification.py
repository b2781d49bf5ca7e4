"""Entities equal the pipeline of transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from deployments.artifacts.types import TaskName
from tests.support.parity_models import ParityModel, agreement
from tests.support.parity_texts import varied_texts

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
STRATEGIES = ("none", "simple", "first", "average", "max")
TEXTS = 220
FEWER = 60  # texts for the tests that do not need all TEXTS
READS = 64  # maximum tokens of the model, two of them special
TOLERANCE = 1e-5  # for probabilities
INT8_AGREEMENT = 0.98  # minimum share of equal labels, among tokens with a score above DECIDED
LOGIT_FACTOR = 4  # scales the logits to about those of a trained model
# A label with a score above DECIDED leads all other labels by more than 0.1, the accuracy gate's
# limit for near ties.
DECIDED = 0.55


@pytest.fixture(scope="module")
def parity_model(tmp_path_factory: pytest.TempPathFactory) -> ParityModel:
    root = tmp_path_factory.mktemp("entities")
    parity_model = ParityModel.make(root, TaskName.TOKEN_CLASSIFICATION, labels=LABELS)
    balance_labels(parity_model)
    return parity_model


def balance_labels(parity_model: ParityModel) -> None:
    """Balance the labels over all tokens and increase the gaps between scores.

    Random weights prefer one or two labels, with small gaps between the others.
    """
    model, encode = parity_model.model(), parity_model.tokenizer()
    texts = varied_texts(parity_model.checkpoint, FEWER, max_tokens=READS - 2, seed=2)
    with torch.inference_mode():
        logits = torch.cat([model(**encode(text, return_tensors="pt")).logits[0] for text in texts])
        model.classifier.bias -= logits.mean(dim=0)
        for parameter in model.classifier.parameters():
            parameter *= LOGIT_FACTOR
    model.save_pretrained(parity_model.checkpoint)


@pytest.fixture(scope="module")
def reference(parity_model: ParityModel) -> Iterator[Any]:
    pipeline = parity_model.pipeline()
    pipeline.tokenizer.model_max_length = READS
    # Real checkpoints define these tokens in their files.
    pipeline.tokenizer.unk_token, pipeline.tokenizer.pad_token = "[UNK]", "[PAD]"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads slow down a small model
    yield pipeline
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def texts(parity_model: ParityModel) -> list[str]:
    return varied_texts(parity_model.checkpoint, TEXTS, max_tokens=READS - 2)


@pytest.fixture(scope="module")
def long_texts(parity_model: ParityModel) -> list[str]:
    return varied_texts(parity_model.checkpoint, TEXTS, max_tokens=3 * READS, seed=1)


def assert_same(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Assert equal entities, with scores within the tolerance."""
    assert sum(map(len, theirs)) >= len(theirs), "too few entities to compare"
    assert remove_scores(ours) == remove_scores(theirs)
    scores = [[entity["score"] for answer in side for entity in answer] for side in (ours, theirs)]
    assert scores[0] == pytest.approx(scores[1], abs=TOLERANCE)


def remove_scores(answers: Sequence[Any]) -> list[Any]:
    return [
        [{key: value for key, value in entity.items() if key != "score"} for entity in answer]
        for answer in answers
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_entities_equal_the_pipeline(
    strategy: str, parity_model: ParityModel, reference: Any, texts: list[str]
) -> None:
    theirs = reference(texts, aggregation_strategy=strategy)
    parameters = {"aggregation_strategy": strategy}
    async with parity_model.serving() as served:
        assert_same(await served.alone(texts, parameters), theirs)
        assert_same(await served.mixed(texts, parameters), theirs)


@pytest.mark.parametrize("strategy", ["none", "simple", "average"])
@pytest.mark.parametrize("ignored", [[], ["O", "LOC", "I-PER"]])
async def test_ignore_labels_equals_the_pipeline(
    strategy: str, ignored: list[str], parity_model: ParityModel, reference: Any, texts: list[str]
) -> None:
    parameters = {"aggregation_strategy": strategy, "ignore_labels": ignored}
    theirs = reference(texts[:FEWER], **parameters)
    async with parity_model.serving() as served:
        assert_same(await served.mixed(texts[:FEWER], parameters), theirs)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
async def test_windows_of_long_texts_equal_the_pipeline(
    strategy: str, parity_model: ParityModel, reference: Any, long_texts: list[str]
) -> None:
    parameters = {"aggregation_strategy": strategy, "stride": 16}
    theirs = [reference(text, **parameters) for text in long_texts]
    async with parity_model.serving() as served:
        assert_same(await served.alone(long_texts, parameters), theirs)
        assert_same(await served.mixed(long_texts, parameters), theirs)


@pytest.mark.parametrize("stride", [0, 1, 30])
async def test_stride_equals_the_pipeline(
    stride: int, parity_model: ParityModel, reference: Any, long_texts: list[str]
) -> None:
    parameters = {"aggregation_strategy": "simple", "stride": stride}
    theirs = [reference(text, **parameters) for text in long_texts[:FEWER]]
    async with parity_model.serving() as served:
        assert_same(await served.mixed(long_texts[:FEWER], parameters), theirs)


@pytest.mark.parametrize("side", ["left", "right"])
async def test_truncated_texts_equal_the_pipeline(
    side: str, parity_model: ParityModel, reference: Any, long_texts: list[str]
) -> None:
    reference.tokenizer.truncation_side = side
    theirs = reference(long_texts[:FEWER], aggregation_strategy="none")
    reference.tokenizer.truncation_side = "right"
    parameters = {"aggregation_strategy": "none", "truncate": True, "truncation_direction": side}
    async with parity_model.serving() as served:
        assert_same(await served.mixed(long_texts[:FEWER], parameters), theirs)


async def test_int8_labels_agree_with_the_pipeline(
    parity_model: ParityModel, reference: Any, texts: list[str]
) -> None:
    parameters = {"aggregation_strategy": "none", "ignore_labels": []}
    theirs = reference(texts, **parameters)
    async with parity_model.serving("int8") as served:
        for ours in (await served.alone(texts, parameters), await served.mixed(texts, parameters)):
            assert agreement(*select_decided_labels(ours, theirs)) >= INT8_AGREEMENT


def select_decided_labels(
    ours: Sequence[Any], theirs: Sequence[Any]
) -> tuple[list[str], list[str]]:
    """Return the labels of both sides for tokens whose expected score exceeds DECIDED."""
    decided = [
        (own["entity"], their["entity"])
        for own_tokens, their_tokens in zip(ours, theirs, strict=True)
        for own, their in zip(own_tokens, their_tokens, strict=True)
        if their["score"] > DECIDED
    ]
    assert len(decided) > len(theirs), "too few decided tokens to compare"
    return [own for own, _ in decided], [their for _, their in decided]
