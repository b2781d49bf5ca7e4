"""One server with a model for every task, for all tests of this folder: none may harm it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.config import GeneratorSettings, IngressUserConfig, LimitSettings
from tests.support.all_models import ALL_MODELS, seal_all_models
from tests.support.http_server import HttpServer, serve_http
from tests.support.in_process import InProcess

SETTINGS = IngressUserConfig(limits=LimitSettings(body_timeout_s=1.0))


@pytest.fixture(scope="session")
def zoo_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with all of ALL_MODELS."""
    return seal_all_models(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def server(zoo_store: Path) -> Iterator[HttpServer]:
    """The zoo behind HTTP. A bug is answered as it would be in production, with 500."""
    world = InProcess(
        zoo_store,
        models=ALL_MODELS,
        writes=GeneratorSettings(max_context_tokens=256),
        raise_bugs=False,
        settings=SETTINGS,
    )
    with serve_http(world) as running:
        yield running
