from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.messages import ModelRef
from deployments.registry import ModelRegistry
from tests.support.decoder_artifacts import seal_tiny_decoder
from tests.support.encoder_harness import EncoderHarness
from tests.support.generator_replicas import REPLY, args


@pytest.fixture
async def encoder(tiny_store: Path) -> AsyncIterator[EncoderHarness]:
    harness = EncoderHarness(tiny_store)
    yield harness
    await harness.replica.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("generators")
    seal_tiny_decoder(store)
    seal_tiny_decoder(store, "tiny/speaker", says=REPLY)
    return store


@pytest.fixture
def refs(store: Path) -> dict[str, ModelRef]:
    return {model.ref.id: model.ref for model in ModelRegistry.of(args(store)).open_models()}
