"""sparse-embeddings equals SPLADE's formula on the logits of transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.common.local_model import LocalModel
from deployments.artifacts.types import TaskName
from tests.support.parity_models import PARITY_MODEL, ParityModel, ServedModel
from tests.support.parity_texts import varied_texts
from tests.support.tiny_encoders import write_json, write_splade

INPUTS = 220
TASK = TaskName.SPARSE_EMBEDDINGS
# For weights of up to 2. The two sides add float32 numbers in different orders.
TOLERANCE = 2e-5
# Minimum cosine of 99 % of the texts. With random weights, single texts exceed the int8 ranges. For
# the probes, the accuracy gate of builds requires a mean of 0.985 and a minimum of 0.93.
LEAST_INT8_COSINE = 0.97
LEAST_BATCHED_COSINE = 0.9999

Weights = NDArray[np.float64]  # [N, vocabulary]


@pytest.fixture(scope="module")
def splade(tmp_path_factory: pytest.TempPathFactory) -> ParityModel:
    return ParityModel.make(tmp_path_factory.mktemp("splade"), TASK)


@pytest.fixture(scope="module")
def texts(splade: ParityModel) -> list[str]:
    return varied_texts(splade.checkpoint, INPUTS, max_tokens=62)


@pytest.fixture(scope="module")
def expected(splade: ParityModel, texts: list[str]) -> Weights:
    return weigh(splade, texts)


@pytest.fixture
async def app(splade: ParityModel) -> AsyncIterator[ServedModel]:
    async with splade.serving() as served:
        yield served


def weigh(model: ParityModel, texts: list[str], *, strategy: str = "max", logs: int = 1) -> Weights:
    """Compute the weights of the vocabulary, one text at a time, so that there is no padding."""
    torch_model, tokenizer = model.model(), model.tokenizer()
    rows = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=64, return_tensors="pt")
        weights = np.maximum(torch_model(**tokens).logits[0].detach().numpy(), 0)
        for _ in range(logs):
            weights = np.log1p(weights)
        rows.append(weights.max(axis=0) if strategy == "max" else weights.sum(axis=0))
    return np.array(rows, dtype=np.float64)


def table(answers: list[Any], width: int) -> Weights:
    """Return sparse vectors as a matrix with one row per vector."""
    rows = np.zeros((len(answers), width))
    for row, vector in zip(rows, answers, strict=True):
        row[vector["indices"]] = vector["values"]
    return rows


def cosines(left: Weights, right: Weights) -> Weights:
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    products: Weights = (left * right).sum(axis=1) / lengths
    return products


async def test_single_texts_equal_the_formula(
    app: ServedModel, texts: list[str], expected: Weights
) -> None:
    answers = [vector for (vector,) in await app.alone(texts)]
    np.testing.assert_allclose(table(answers, expected.shape[1]), expected, rtol=0, atol=TOLERANCE)
    share = np.mean([len(vector["indices"]) for vector in answers]) / expected.shape[1]
    assert 0.01 < share < 0.5, "the vectors are sparse"


async def test_batched_texts_equal_the_formula(
    app: ServedModel, texts: list[str], expected: Weights
) -> None:
    answers = table(await app.mixed(texts), expected.shape[1])
    np.testing.assert_allclose(answers, expected, rtol=0, atol=TOLERANCE)


async def test_truncated_texts_equal_the_formula(
    app: ServedModel, splade: ParityModel, texts: list[str]
) -> None:
    long = [f"{text} {other}" for text, other in zip(texts, reversed(texts), strict=True)][:60]
    wanted = weigh(splade, long)
    answers = table(await app.mixed(long), wanted.shape[1])
    np.testing.assert_allclose(answers, wanted, rtol=0, atol=TOLERANCE)


async def test_local_model_equals_the_server(
    app: ServedModel, splade: ParityModel, texts: list[str], expected: Weights
) -> None:
    local = LocalModel.open(splade.store(), PARITY_MODEL)
    values = [vector for (vector,) in local.unbatched_values(texts[:20], threads=1)]
    np.testing.assert_allclose(
        table(values, expected.shape[1]), expected[:20], rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize(("strategy", "activation"), [("sum", "relu"), ("max", "log1p_relu")])
async def test_poolings_of_sentence_transformers_equal_the_formula(
    texts: list[str], tmp_path: Path, strategy: str, activation: str
) -> None:
    model = ParityModel.make(tmp_path, TASK)
    write_splade(model.checkpoint, pooling_strategy=strategy, activation_function=activation)
    settings = {"prompts": {"query": "the film: "}, "default_prompt_name": "query"}
    write_json(model.checkpoint / "config_sentence_transformers.json", settings)
    few = texts[:40]
    logs = 2 if activation == "log1p_relu" else 1
    prompted = [f"the film: {text}" for text in few]
    wanted = weigh(model, prompted, strategy=strategy, logs=logs)
    async with model.serving() as app:
        answers = table(await app.mixed(few), wanted.shape[1])
    # A sum has up to 64 terms.
    np.testing.assert_allclose(answers, wanted, rtol=0, atol=20 * TOLERANCE)


async def test_masked_language_model_is_built_as_splade_v2(
    splade: ParityModel, texts: list[str], expected: Weights, tmp_path: Path
) -> None:
    model = ParityModel.make(tmp_path, TASK)
    (model.checkpoint / "modules.json").unlink()
    async with model.serving() as app:
        assert app.manifest.tasks == ("sparse-embeddings",)
        answers = table(await app.mixed(texts[:40]), expected.shape[1])
    np.testing.assert_allclose(answers, expected[:40], rtol=0, atol=TOLERANCE)


async def test_int8_vectors_are_near_fp32_and_do_not_depend_on_the_batch(
    splade: ParityModel, texts: list[str], expected: Weights
) -> None:
    async with splade.serving("int8") as app:
        single = table([vector for (vector,) in await app.alone(texts)], expected.shape[1])
        batched = table(await app.mixed(texts), expected.shape[1])
        (parity,) = (candidate.parity for candidate in app.manifest.candidates)
    assert np.quantile(cosines(single, expected), 0.01) >= LEAST_INT8_COSINE
    assert cosines(batched, single).min() >= LEAST_BATCHED_COSINE
    assert parity.batched_cosine_worst >= 0.999
    assert parity.top1_agreement is None
