"""Entities as transformers' own pipeline finds them on the same weights."""

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
FEWER = 60  # where one of the other tests reads them all
READS = 64  # tokens, two of them special
TOLERANCE = 1e-5  # of a probability
INT8_AGREEMENT = 0.98  # of the labels of decided tokens
SURER = 4  # times larger logits, near to those of a trained model
DECIDED = 0.55  # the next label has 0.45 at most: as far apart as the gate of a build asks


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> ParityModel:
    root = tmp_path_factory.mktemp("entities")
    twins = ParityModel.make(root, TaskName.TOKEN_CLASSIFICATION, labels=LABELS)
    balance(twins)
    return twins


def balance(twins: ParityModel) -> None:
    """Make all labels about as likely over all tokens, and every token's own clearly likeliest.

    Random weights prefer one or two of them by far, and are of two minds about the rest.
    """
    model, encode = twins.model(), twins.tokenizer()
    texts = varied_texts(twins.checkpoint, FEWER, most_tokens=READS - 2, seed=2)
    with torch.inference_mode():
        logits = torch.cat([model(**encode(text, return_tensors="pt")).logits[0] for text in texts])
        model.classifier.bias -= logits.mean(dim=0)
        for parameter in model.classifier.parameters():
            parameter *= SURER
    model.save_pretrained(twins.checkpoint)


@pytest.fixture(scope="module")
def reference(twins: ParityModel) -> Iterator[Any]:
    pipeline = twins.pipeline()
    pipeline.tokenizer.model_max_length = READS
    # As files of real checkpoints say.
    pipeline.tokenizer.unk_token, pipeline.tokenizer.pad_token = "[UNK]", "[PAD]"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them wait for each other, on a model this small
    yield pipeline
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def texts(twins: ParityModel) -> list[str]:
    return varied_texts(twins.checkpoint, TEXTS, most_tokens=READS - 2)


@pytest.fixture(scope="module")
def long_texts(twins: ParityModel) -> list[str]:
    return varied_texts(twins.checkpoint, TEXTS, most_tokens=3 * READS, seed=1)


def assert_same(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Everything equal but for the scores, which are near."""
    assert sum(map(len, theirs)) >= len(theirs), "too few entities to compare"
    assert unscored(ours) == unscored(theirs)
    scores = [[entity["score"] for answer in side for entity in answer] for side in (ours, theirs)]
    assert scores[0] == pytest.approx(scores[1], abs=TOLERANCE)


def unscored(answers: Sequence[Any]) -> list[Any]:
    return [
        [{key: value for key, value in entity.items() if key != "score"} for entity in answer]
        for answer in answers
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_entities_offsets_and_words_are_the_pipelines_alone_and_in_company(
    strategy: str, twins: ParityModel, reference: Any, texts: list[str]
) -> None:
    theirs = reference(texts, aggregation_strategy=strategy)
    parameters = {"aggregation_strategy": strategy}
    async with twins.serving() as served:
        assert_same(await served.alone(texts, parameters), theirs)
        assert_same(await served.mixed(texts, parameters), theirs)


@pytest.mark.parametrize("strategy", ["none", "simple", "average"])
@pytest.mark.parametrize("ignored", [[], ["O", "LOC", "I-PER"]])
async def test_labels_are_ignored_as_the_pipeline_does(
    strategy: str, ignored: list[str], twins: ParityModel, reference: Any, texts: list[str]
) -> None:
    parameters = {"aggregation_strategy": strategy, "ignore_labels": ignored}
    theirs = reference(texts[:FEWER], **parameters)
    async with twins.serving() as served:
        assert_same(await served.mixed(texts[:FEWER], parameters), theirs)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
async def test_windows_of_long_texts_are_merged_as_the_pipeline_does(
    strategy: str, twins: ParityModel, reference: Any, long_texts: list[str]
) -> None:
    parameters = {"aggregation_strategy": strategy, "stride": 16}
    theirs = [reference(text, **parameters) for text in long_texts]
    async with twins.serving() as served:
        assert_same(await served.alone(long_texts, parameters), theirs)
        assert_same(await served.mixed(long_texts, parameters), theirs)


@pytest.mark.parametrize("stride", [0, 1, 30])
async def test_windows_share_as_many_tokens_as_the_pipelines(
    stride: int, twins: ParityModel, reference: Any, long_texts: list[str]
) -> None:
    parameters = {"aggregation_strategy": "simple", "stride": stride}
    theirs = [reference(text, **parameters) for text in long_texts[:FEWER]]
    async with twins.serving() as served:
        assert_same(await served.mixed(long_texts[:FEWER], parameters), theirs)


@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_text_cut_to_fit_is_answered_as_by_the_pipeline(
    side: str, twins: ParityModel, reference: Any, long_texts: list[str]
) -> None:
    reference.tokenizer.truncation_side = side
    theirs = reference(long_texts[:FEWER], aggregation_strategy="none")
    reference.tokenizer.truncation_side = "right"
    parameters = {"aggregation_strategy": "none", "truncate": True, "truncation_direction": side}
    async with twins.serving() as served:
        assert_same(await served.mixed(long_texts[:FEWER], parameters), theirs)


async def test_int8_gives_the_tokens_the_labels_of_the_pipeline(
    twins: ParityModel, reference: Any, texts: list[str]
) -> None:
    parameters = {"aggregation_strategy": "none", "ignore_labels": []}
    theirs = reference(texts, **parameters)
    async with twins.serving("int8") as served:
        for ours in (await served.alone(texts, parameters), await served.mixed(texts, parameters)):
            assert agreement(*labels_where_decided(ours, theirs)) >= INT8_AGREEMENT


def labels_where_decided(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[list[str], list[str]]:
    """The labels of the tokens of which the pipeline is DECIDED, on either side."""
    decided = [
        (own["entity"], their["entity"])
        for own_tokens, their_tokens in zip(ours, theirs, strict=True)
        for own, their in zip(own_tokens, their_tokens, strict=True)
        if their["score"] > DECIDED
    ]
    assert len(decided) > len(theirs), "too few decided tokens to compare"
    return [own for own, _ in decided], [their for _, their in decided]
