"""Fixtures of the tests in a browser: one browser and server per file, one tab per test.

A test fails at its end if the console of its tab has errors or warnings, or if the tab sent
requests to other hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from benchmarks.page.browser import find_browser, open_browser
from deployments.ingress.devices.cluster_state import ReplicaTarget
from tests.support.browser import PAGE_MODELS, Visitor, seal_page_models
from tests.support.http_server import HttpServer, serve_http
from tests.support.in_process import InProcess
from tests.support.scripted_generation import ScriptedGenerator

TARGETS = {"CpuEncoder": ReplicaTarget(3, 1, 8), "Tokenizer": ReplicaTarget(1, 1, 1)}


@pytest.fixture(scope="session")
def installed_browser() -> None:
    if find_browser() is None:
        pytest.skip("no Chromium here: `apt-get install chromium`")


@pytest.fixture(scope="module")
def browser(installed_browser: None) -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def page_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seal_page_models(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def generator() -> ScriptedGenerator:
    return ScriptedGenerator()


@pytest.fixture(scope="module")
def server(page_store: Path, generator: ScriptedGenerator) -> Iterator[HttpServer]:
    app = InProcess(page_store, models=PAGE_MODELS, generator=generator, targets=TARGETS)
    with serve_http(app) as server:
        yield server


@pytest.fixture
def visitor(browser: Browser, server: HttpServer) -> Iterator[Visitor]:
    visitor = Visitor.arrive(browser, server.url)
    yield visitor
    visitor.leave()
