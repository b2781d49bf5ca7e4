from __future__ import annotations

import logging
from pathlib import Path

import pytest

from deployments.ingress import request_log
from deployments.ingress.request_log import MAX_LINES_PER_S
from deployments.rate_limit import RateLimit
from tests.support.artifacts import EMBEDDER, seal_tiny
from tests.support.decoder_artifacts import seal_tiny_decoder


@pytest.fixture(scope="session")
def writing_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a store with EMBEDDER and DECODER for the session. Tests must not change it."""
    store = tmp_path_factory.mktemp("writing")
    seal_tiny(store, EMBEDDER)
    seal_tiny_decoder(store)
    return store


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Capture log lines, of which earlier tests have not used up the limit."""
    monkeypatch.setattr(request_log, "LINE_LIMIT", RateLimit(MAX_LINES_PER_S))
    caplog.set_level(logging.INFO, "ray.serve.hundredfold")
    return caplog
