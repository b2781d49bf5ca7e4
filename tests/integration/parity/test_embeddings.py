"""feature-extraction and sentence-similarity equal transformers on the same weights.

The pipeline of transformers returns one vector per token. The tests average them in float64, as
sentence-transformers does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deployments.artifacts.types import TaskName
from tests.support.parity_models import ParityModel, ServedModel
from tests.support.parity_texts import varied_texts
from tests.support.tiny_encoders import HIDDEN, POSITIONS, write_json

INPUTS = 220
# For cosines and values of unit vectors. The two sides add float32 numbers in different orders.
TOLERANCE = 2e-6
# For vectors before normalization, which have values of up to 3.
RAW_TOLERANCE = 1e-5
# Minimum cosines of the worst text. For int8, the accuracy gate of builds requires a mean of 0.985
# and a minimum of 0.93.
LEAST_INT8_COSINE = 0.98
LEAST_BATCHED_COSINE = 0.9999

Float64Vectors = NDArray[np.float64]


@pytest.fixture(scope="module")
def texts(embedder: ParityModel) -> list[str]:
    return varied_texts(embedder.checkpoint, INPUTS, max_tokens=62)


@pytest.fixture(scope="module")
def expected(embedder: ParityModel, texts: list[str]) -> Float64Vectors:
    """Return the mean token vector of each text, special tokens included: [N, HIDDEN]."""
    per_token = embedder.pipeline()(texts)
    return np.stack([np.mean(np.array(tokens)[0], axis=0) for tokens in per_token])


@pytest.fixture
async def app(embedder: ParityModel) -> AsyncIterator[ServedModel]:
    async with embedder.serving() as served:
        yield served


def units(vectors: Float64Vectors) -> Float64Vectors:
    """Scale each row to length 1."""
    scaled: Float64Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled


def table(answers: list[Any]) -> Float64Vectors:
    """Return the answers as a matrix with one row per answer."""
    return np.array(answers, dtype=np.float64)


async def test_single_texts_get_the_mean_of_their_tokens(
    app: ServedModel, texts: list[str], expected: Float64Vectors
) -> None:
    answers = table([vector for (vector,) in await app.alone(texts)])
    np.testing.assert_allclose(answers, expected, rtol=0, atol=RAW_TOLERANCE)


async def test_batched_texts_get_the_mean_of_their_tokens(
    app: ServedModel, texts: list[str], expected: Float64Vectors
) -> None:
    answers = table(await app.mixed(texts))
    np.testing.assert_allclose(answers, expected, rtol=0, atol=RAW_TOLERANCE)


@pytest.mark.parametrize("dimensions", [1, 5, HIDDEN, None])
async def test_dimensions_and_normalize_equal_the_reference(
    app: ServedModel, texts: list[str], expected: Float64Vectors, dimensions: int | None
) -> None:
    answers = await app.mixed(texts, {"normalize": True, "dimensions": dimensions})
    wanted = units(expected[:, :dimensions])
    np.testing.assert_allclose(table(answers), wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("side", ["left", "right"])
async def test_truncated_texts_equal_transformers(
    app: ServedModel, embedder: ParityModel, texts: list[str], side: str
) -> None:
    long = [f"{text} {other}" for text, other in zip(texts, reversed(texts), strict=True)]
    tokenizer = embedder.tokenizer()
    tokenizer.truncation_side = side
    cut = [tokenizer(text, truncation=True, max_length=app.manifest.max_tokens) for text in long]
    assert sum(len(one["input_ids"]) == app.manifest.max_tokens for one in cut) > 50
    model = embedder.model()
    # One text at a time, so that the mean has no padding.
    outputs = [model(**tokenizer.pad([one], return_tensors="pt")) for one in cut]
    wanted = np.stack([out.last_hidden_state[0].detach().numpy().mean(axis=0) for out in outputs])
    answers = await app.mixed(long, {"truncate": True, "truncation_direction": side})
    np.testing.assert_allclose(table(answers), wanted, rtol=0, atol=RAW_TOLERANCE)


async def test_truncation_of_the_checkpoint_is_the_default(
    texts: list[str], tmp_path: Path
) -> None:
    model = ParityModel.make(tmp_path, TaskName.FEATURE_EXTRACTION, truncation_side="left")
    write_json(model.checkpoint / "config_sentence_transformers.json", {"truncate_dim": 16})
    long = " ".join(texts[:20])
    tokens = model.tokenizer()(long, truncation=True, max_length=POSITIONS, return_tensors="pt")
    (wanted,) = model.model()(**tokens).last_hidden_state.detach().numpy().mean(axis=1)
    async with model.serving() as app:
        (vector,) = await app.ask(long)
        (whole,) = await app.ask(long, {"dimensions": HIDDEN})
    np.testing.assert_allclose(vector, wanted[:16], rtol=0, atol=RAW_TOLERANCE)
    np.testing.assert_allclose(whole, wanted, rtol=0, atol=RAW_TOLERANCE)


async def test_similarity_is_the_cosine_of_the_means(
    embedder: ParityModel, texts: list[str], expected: Float64Vectors
) -> None:
    wanted = units(expected) @ units(expected).T
    async with embedder.serving(task=TaskName.SENTENCE_SIMILARITY) as app:
        for i in range(0, len(texts), 20):
            asked = {"source_sentence": texts[i], "sentences": texts}
            assert await app.ask(asked) == pytest.approx(wanted[i].tolist(), abs=TOLERANCE)


async def test_int8_vectors_are_close_in_cosine(
    embedder: ParityModel, texts: list[str], expected: Float64Vectors
) -> None:
    async with embedder.serving("int8") as app:
        alone = table([vector for (vector,) in await app.alone(texts, {"normalize": True})])
        mixed = table(await app.mixed(texts, {"normalize": True}))
    for answers in (alone, mixed):
        cosines = (answers * units(expected)).sum(axis=1)
        assert cosines.min() >= LEAST_INT8_COSINE
    assert (alone * mixed).sum(axis=1).min() >= LEAST_BATCHED_COSINE
