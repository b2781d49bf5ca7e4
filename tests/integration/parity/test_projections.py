"""Embedding models with Dense modules equal sentence-transformers on the same weights.

sentence-transformers averages the token vectors, multiplies the mean with the weights of each Dense
module in turn, and applies its activation. The tests do so in float64.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from build_artifacts.checkpoints.export_wrapper import input_names
from build_artifacts.steps.program import save_program
from deployments.artifacts.types import TaskName
from deployments.engines.pytorch.program import read_program
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.parity_models import ParityModel
from tests.support.parity_texts import varied_texts
from tests.support.tiny_encoders import HIDDEN, write_dense

INPUTS = 60
TOLERANCE = 1e-5
WIDTH = 24  # of the last Dense module
MIN_INT8_COSINE = 0.98


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ParityModel:
    return ParityModel.make(tmp_path_factory.mktemp("projected"), TaskName.FEATURE_EXTRACTION)


@pytest.fixture(scope="module")
def texts(model: ParityModel) -> list[str]:
    return varied_texts(model.checkpoint, INPUTS, max_tokens=62)


@pytest.fixture(scope="module")
def expected(model: ParityModel, texts: list[str]) -> NDArray[np.float64]:
    """Add two Dense modules to the checkpoint and return the vectors [N, WIDTH]."""
    identity = "torch.nn.modules.linear.Identity"
    first = write_dense(model.checkpoint, "2_Dense", output_width=48)
    last = write_dense(
        model.checkpoint,
        "3_Dense",
        input_width=48,
        output_width=WIDTH,
        bias=False,
        activation_function=identity,
    )
    means = np.stack([np.mean(np.array(tokens)[0], axis=0) for tokens in model.pipeline()(texts)])
    projected = np.tanh(means @ first["linear.weight"].T + first["linear.bias"])
    vectors: NDArray[np.float64] = projected @ last["linear.weight"].T
    return vectors


async def test_vectors_are_projected_after_pooling(
    model: ParityModel, texts: list[str], expected: NDArray[np.float64]
) -> None:
    async with model.serving() as app:
        answers = np.array(await app.mixed(texts))
        short = np.array(await app.mixed(texts, {"normalize": True, "dimensions": 5}))
    np.testing.assert_allclose(answers, expected, rtol=0, atol=TOLERANCE)
    wanted = expected[:, :5] / np.linalg.norm(expected[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose(short, wanted, rtol=0, atol=TOLERANCE)
    assert (app.manifest.output_width, app.manifest.token_width) == (WIDTH, HIDDEN)


async def test_token_vectors_are_not_projected(
    model: ParityModel, texts: list[str], expected: NDArray[np.float64]
) -> None:
    assert expected.shape == (INPUTS, WIDTH)
    async with model.serving(task=TaskName.TOKEN_EMBEDDINGS) as app:
        (answer,) = await app.ask(texts[:1])
    wanted = np.array(model.pipeline()(texts[0]))[0]
    np.testing.assert_allclose(np.array(answer), wanted, rtol=0, atol=TOLERANCE)


async def test_int8_vectors_are_close_in_cosine(
    model: ParityModel, texts: list[str], expected: NDArray[np.float64]
) -> None:
    async with model.serving("int8") as app:
        answers = np.array(await app.mixed(texts, {"normalize": True}))
    cosines = (answers * expected / np.linalg.norm(expected, axis=1, keepdims=True)).sum(axis=1)
    assert cosines.min() >= MIN_INT8_COSINE


def test_torch_program_holds_the_projection(
    model: ParityModel, texts: list[str], expected: NDArray[np.float64], tmp_path: Path
) -> None:
    torch_model, metadata = model.model(), read_checkpoint_metadata(model.checkpoint)
    save_program(torch_model, metadata, tmp_path / "program")
    program = read_program(tmp_path / "program", "cpu")
    inputs = model.tokenizer()(texts[0], return_tensors="pt")
    with torch.inference_mode():
        (vector,) = program(*(inputs[name] for name in input_names(torch_model, metadata)))
    np.testing.assert_allclose(vector.numpy(), expected[0], rtol=0, atol=TOLERANCE)
    assert not hasattr(torch_model, "sentence_projection"), "the checkpoint's model was changed"
