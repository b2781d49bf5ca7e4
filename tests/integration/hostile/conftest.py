"""One server with a model for every task, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.config import GeneratorSettings, IngressUserConfig, LimitSettings
from tests.support.all_models import ALL_MODELS, seal_all_models
from tests.support.http_server import HttpServer, serve_http
from tests.support.in_process import InProcess

# Slow hosts take seconds for a body and for a request, as all attacks run at the same time.
SETTINGS = IngressUserConfig(timeout_s=100.0, limits=LimitSettings(body_timeout_s=3.0))


@pytest.fixture(scope="session")
def all_models_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a tiny model for every task."""
    return seal_all_models(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def server(all_models_store: Path) -> Iterator[HttpServer]:
    """A server of all models. An unexpected exception returns status 500, as in production."""
    app = InProcess(
        all_models_store,
        models=ALL_MODELS,
        writes=GeneratorSettings(max_context_tokens=256),
        raise_bugs=False,
        settings=SETTINGS,
    )
    with serve_http(app) as running:
        yield running
