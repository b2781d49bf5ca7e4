"""Scores and order of text-ranking equal logits or cosines of torch on the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deployments.artifacts.types import TaskName
from tests.support.parity_models import ParityModel, ServedModel, agreement
from tests.support.parity_texts import varied_texts
from tests.support.tiny_encoders import write_json

READS = 64  # maximum tokens of the model; three tokens of a pair are special
QUERY_TOKENS, TEXT_TOKENS = 20, 40
QUERIES, TEXTS_EACH = 20, 12
PROMPTS = {"query": "good film ", "document": "that was "}
LOGIT_TOLERANCE = 1e-4
SCORE_TOLERANCE = 1e-5  # for probabilities and cosines
# Minimum share of equally ordered pairs of texts. Pairs whose scores differ by less than CLEAR_GAP
# do not count, because int8 may swap them.
INT8_AGREEMENT, CLEAR_GAP = 0.98, 0.1


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> ParityModel:
    root = tmp_path_factory.mktemp("cross-encoder")
    return ParityModel.make(root, TaskName.TEXT_RANKING, labels=("SCORE",))


@pytest.fixture(scope="module")
def bi_encoder(tmp_path_factory: pytest.TempPathFactory) -> ParityModel:
    parity_model = ParityModel.make(
        tmp_path_factory.mktemp("bi-encoder"), TaskName.FEATURE_EXTRACTION
    )
    config = {"prompts": PROMPTS, "default_prompt_name": None}
    write_json(parity_model.checkpoint / "config_sentence_transformers.json", config)
    return parity_model


@pytest.fixture(scope="module")
def searches(cross_encoder: ParityModel) -> list[dict[str, Any]]:
    return create_searches(cross_encoder, QUERY_TOKENS, TEXT_TOKENS)


@pytest.fixture(scope="module")
def long_searches(cross_encoder: ParityModel) -> list[dict[str, Any]]:
    return create_searches(cross_encoder, READS, 3 * READS)


def create_searches(
    parity_model: ParityModel, query_tokens: int, text_tokens: int
) -> list[dict[str, Any]]:
    """Return rerank requests, each with one query and TEXTS_EACH different texts."""
    queries = varied_texts(parity_model.checkpoint, QUERIES, max_tokens=query_tokens, seed=1)
    count = QUERIES * TEXTS_EACH
    texts = varied_texts(parity_model.checkpoint, count, max_tokens=text_tokens, seed=2)
    return [
        {"query": query, "texts": texts[i * TEXTS_EACH : (i + 1) * TEXTS_EACH]}
        for i, query in enumerate(queries)
    ]


def compute_logits(parity_model: ParityModel, searches: Sequence[Any]) -> NDArray[np.float64]:
    """Return the logits [queries, texts] of the torch model, which reads one pair at a time."""
    import torch

    model, tokenizer = parity_model.model(), parity_model.tokenizer()

    def logit(query: str, text: str) -> float:
        pair = tokenizer(query, text, return_tensors="pt", truncation=True, max_length=READS)
        return float(model(**pair).logits[0, 0])

    with torch.no_grad():
        return np.array([[logit(s["query"], text) for text in s["texts"]] for s in searches])


def compute_cosines(parity_model: ParityModel, searches: Sequence[Any]) -> NDArray[np.float64]:
    """Return the cosines [queries, texts] of the torch model's mean token vectors."""
    import torch

    model, tokenizer = parity_model.model(), parity_model.tokenizer()

    def unit(text: str) -> NDArray[np.float64]:
        tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=READS)
        mean = model(**tokens).last_hidden_state[0].double().mean(dim=0).numpy()
        return np.asarray(mean / np.linalg.norm(mean))

    with torch.no_grad():
        return np.array(
            [
                [
                    unit(PROMPTS["query"] + s["query"]) @ unit(PROMPTS["document"] + text)
                    for text in s["texts"]
                ]
                for s in searches
            ]
        )


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-logits)))


async def ask_concurrently(
    served: ServedModel, searches: Sequence[Any], **parameters: Any
) -> list[Any]:
    """Send one request per search, all concurrently."""
    return list(await asyncio.gather(*(served.ask(search, parameters) for search in searches)))


async def ask_text_by_text(
    served: ServedModel, searches: Sequence[Any], **parameters: Any
) -> NDArray[np.float64]:
    """Return the scores [queries, texts] of sequential requests with one text each."""
    answers = [
        await served.ask({"query": search["query"], "texts": [text]}, parameters)
        for search in searches
        for text in search["texts"]
    ]
    return np.array([entry["score"] for (entry,) in answers]).reshape(len(searches), -1)


def collect_scores(answers: Sequence[Any]) -> NDArray[np.float64]:
    """Return the scores [queries, texts], with the texts in the order of the requests."""
    return np.array(
        [[e["score"] for e in sorted(answer, key=lambda e: e["index"])] for answer in answers]
    )


def assert_same_order(answers: Sequence[Any], keys: NDArray[np.float64], tolerance: float) -> None:
    """Assert that answers are in descending order of `keys` [queries, texts], up to near ties.

    `keys` are reference scores. Near ties differ by less than twice the tolerance.
    """
    ours = [[entry["index"] for entry in answer] for answer in answers]
    for order, row in zip(ours, keys, strict=True):
        assert all(row[a] > row[b] - 2 * tolerance for a, b in pairwise(order))
    clear = np.flatnonzero(-np.diff(-np.sort(-keys)).max(axis=1) > 2 * tolerance)
    assert len(clear) >= 0.9 * len(keys), "too many near-ties to speak of an order"
    theirs = np.argsort(-keys, axis=1)
    assert agreement([ours[i] for i in clear], [theirs[i].tolist() for i in clear]) == 1


@pytest.mark.parametrize("raw_scores", [False, True])
async def test_cross_encoder_scores_equal_torch(
    raw_scores: bool, cross_encoder: ParityModel, searches: list[dict[str, Any]]
) -> None:
    logits = compute_logits(cross_encoder, searches)
    expected = logits if raw_scores else sigmoid(logits)
    approximate = pytest.approx(expected, abs=LOGIT_TOLERANCE if raw_scores else SCORE_TOLERANCE)
    async with cross_encoder.serving() as served:
        answers = await ask_concurrently(served, searches, raw_scores=raw_scores)
        assert collect_scores(answers) == approximate
        assert_same_order(answers, logits, LOGIT_TOLERANCE)
        assert await ask_text_by_text(served, searches, raw_scores=raw_scores) == approximate


async def test_truncated_pairs_equal_torch(
    cross_encoder: ParityModel, long_searches: list[dict[str, Any]]
) -> None:
    logits = compute_logits(cross_encoder, long_searches)
    async with cross_encoder.serving() as served:
        answers = await ask_concurrently(served, long_searches, truncate=True)
    assert collect_scores(answers) == pytest.approx(sigmoid(logits), abs=SCORE_TOLERANCE)
    assert_same_order(answers, logits, LOGIT_TOLERANCE)


async def test_bi_encoder_scores_equal_torch(
    bi_encoder: ParityModel, searches: list[dict[str, Any]]
) -> None:
    cosines = compute_cosines(bi_encoder, searches)
    approximate = pytest.approx(cosines, abs=SCORE_TOLERANCE)
    async with bi_encoder.serving(task=TaskName.TEXT_RANKING) as served:
        answers = await ask_concurrently(served, searches, return_text=True)
        assert collect_scores(answers) == approximate
        assert_same_order(answers, cosines, SCORE_TOLERANCE)
        assert await ask_text_by_text(served, searches) == approximate
    for answer, search in zip(answers, searches, strict=True):
        assert all(entry["text"] == search["texts"][entry["index"]] for entry in answer)


async def test_int8_order_agrees_with_torch(
    cross_encoder: ParityModel, searches: list[dict[str, Any]]
) -> None:
    expected = sigmoid(compute_logits(cross_encoder, searches))
    async with cross_encoder.serving("int8") as served:
        ours = collect_scores(await ask_concurrently(served, searches))
    theirs, mine = (side[:, :, None] - side[:, None, :] for side in (expected, ours))
    clear = np.abs(theirs) > CLEAR_GAP
    assert clear.sum() > 2 * QUERIES * TEXTS_EACH
    assert (np.sign(theirs) == np.sign(mine))[clear].mean() >= INT8_AGREEMENT
