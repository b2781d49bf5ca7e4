"""Poolings of the exported model equal the definitions of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from build_artifacts.checkpoints.export_wrapper import wrap_for_export
from build_artifacts.checkpoints.models import load_model
from deployments.artifacts.types import ModelHead
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.tiny_encoders import tiny_checkpoint, write_json

# Token vectors of one text without padding, [T, W], to its vector, [W].
DEFINITIONS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "mean": lambda tokens: tokens.mean(0),
    "cls": lambda tokens: tokens[0],
    "lasttoken": lambda tokens: tokens[-1],
    "max": lambda tokens: tokens.max(0),
    "mean_sqrt_len_tokens": lambda tokens: tokens.sum(0) / np.sqrt(len(tokens)),
    "weightedmean": lambda tokens: np.average(tokens, axis=0, weights=range(1, len(tokens) + 1)),
}


@pytest.mark.parametrize("pooling", DEFINITIONS)
def test_pooling_reads_no_padding(pooling: str, tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)
    write_json(directory / "1_Pooling" / "config.json", {"pooling_mode": pooling})
    model = load_model(directory, head=ModelHead.VECTOR, dtype="float32")
    wrapped = wrap_for_export(model, read_checkpoint_metadata(directory), with_tokens=True)
    lengths = [7, 1, 4]
    mask = torch.tensor([[int(i < length) for i in range(7)] for length in lengths])
    ids = torch.arange(21).reshape(3, 7) + 5
    with torch.inference_mode():
        vectors, tokens = wrapped(
            input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids)
        )
    for vector, rows, length in zip(vectors, tokens.double().numpy(), lengths, strict=True):
        expected = DEFINITIONS[pooling](rows[:length])
        np.testing.assert_allclose(vector.numpy(), expected, rtol=1e-5, atol=1e-5)
