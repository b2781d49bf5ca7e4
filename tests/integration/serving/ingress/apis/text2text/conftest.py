"""Tiny encoder-decoder models, served with real or scripted generators, and their reference."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.artifacts.generation_config import GenerationDefaults
from deployments.artifacts.types import TEXT2TEXT_TASKS, TaskName
from deployments.config import GeneratorSettings
from tests.support.artifacts import EMBEDDER, seal_tiny
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.encoder_decoder_artifacts import (
    SUMMARIZER,
    TRANSLATOR,
    WRITER,
    TinyEncoderDecoder,
)
from tests.support.in_process import InProcess
from tests.support.scripted_generation import ScriptedGenerator
from tests.support.torch_threads import one_thread

MODELS = (EMBEDDER, SUMMARIZER, TRANSLATOR, WRITER)
PREFIX = "put this briefly : "
# Generation defaults of SUMMARIZER. OWN_WAY_SAID has the same values as request parameters.
OWN_WAY = GenerationDefaults(
    num_beams=3,
    length_penalty=2.0,
    repetition_penalty=1.5,
    no_repeat_ngram_size=2,
    min_new_tokens=3,
    max_new_tokens=12,
)
OWN_WAY_SAID: dict[str, Any] = {
    "num_beams": 3,
    "length_penalty": 2.0,
    "repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 3,
    "max_new_tokens": 12,
}


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def tiny_writer(tmp_path_factory: pytest.TempPathFactory) -> TinyEncoderDecoder:
    return TinyEncoderDecoder.make(tmp_path_factory.mktemp("writer"))


@pytest.fixture(scope="session")
def rewriting_store(
    tiny_writer: TinyEncoderDecoder, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A store with MODELS and DECODER. Tests share it and must not change it."""
    store = tmp_path_factory.mktemp("rewriting")
    seal_tiny(store, EMBEDDER)
    seal_tiny_decoder(store)
    tiny_writer.seal(
        store,
        SUMMARIZER,
        (TaskName.SUMMARIZATION, TaskName.TEXT2TEXT_GENERATION),
        defaults=OWN_WAY,
        task_prefixes={TaskName.SUMMARIZATION: PREFIX},
    )
    tiny_writer.seal(store, TRANSLATOR, (TaskName.TRANSLATION,))
    tiny_writer.seal(store, WRITER, TEXT2TEXT_TASKS)
    return store


@pytest.fixture
async def http(rewriting_store: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application with a real generator."""
    writes = GeneratorSettings(kv_slots=4, max_context_tokens=64)
    async with InProcess(rewriting_store, models=MODELS, writes=writes).client() as client:
        yield client


@pytest.fixture
async def client_without_generator(rewriting_store: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client for tests of requests that the ingress rejects without a call of the generator."""
    models, generator = (*MODELS, DECODER), ScriptedGenerator()
    async with InProcess(rewriting_store, models=models, generator=generator).client() as client:
        yield client
    assert not generator.calls
