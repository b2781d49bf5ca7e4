from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.artifacts import EMBEDDER, seal_tiny
from tests.support.decoder_artifacts import seal_tiny_decoder


@pytest.fixture(scope="session")
def writing_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a store with EMBEDDER and DECODER for the session. Tests must not change it."""
    store = tmp_path_factory.mktemp("writing")
    seal_tiny(store, EMBEDDER)
    seal_tiny_decoder(store)
    return store
