"""A new engine needs one EngineKind and one line in ENGINES to serve requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from deployments.artifacts.manifest import TOKENIZER_NAME, ArtifactManifest
from deployments.config import GeneratorSettings
from deployments.engines import ENGINES
from tests.support.artifacts import EMBEDDER, WIDTH, seal, seal_tiny
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.in_process import InProcess
from tests.support.toy_engine import AXIS, TOY


@pytest.fixture(autouse=True)
def _toy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "toy", TOY)  # type: ignore[misc]  # the one line in the table


def use_toy_engine(directory: Path) -> None:
    """Rewrite a sealed artifact so that all its candidates use the toy engine."""
    manifest = ArtifactManifest.read(directory)
    candidates = tuple(
        candidate.model_copy(update={"engine": "toy"}) for candidate in manifest.candidates
    )
    seal(directory, manifest.model_copy(update={"candidates": candidates}))


async def test_toy_encoder_answers_a_request(tmp_path: Path) -> None:
    use_toy_engine(seal_tiny(tmp_path, EMBEDDER))
    async with InProcess(tmp_path, (EMBEDDER,)).client() as client:
        response = await client.post(f"/models/{EMBEDDER}", json={"inputs": "a film"})
    assert response.status_code == 200, response.text
    assert response.headers["x-compute-type"] == "cpu-fp32"
    assert response.json() == [np.eye(WIDTH)[AXIS].tolist()]


async def test_toy_decoder_generates_text(tmp_path: Path) -> None:
    directory = seal_tiny_decoder(tmp_path)
    use_toy_engine(directory)
    settings = GeneratorSettings(kv_slots=2, max_context_tokens=64)
    body = {"model": DECODER, "prompt": "ab", "max_tokens": 4, "temperature": 0}
    async with InProcess(tmp_path, (DECODER,), writes=settings).client() as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_NAME))
    last = tokenizer.encode("ab").ids[-1]
    assert response.json()["choices"][0]["text"] == tokenizer.decode([last] * 4)
