"""The OpenAPI document and the documentation page."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from openapi_spec_validator import validate

from tests.support.ray_cluster import Cluster

TASK = "/models/{id}/pipeline/{task}"
VERSION = "/v2/models/{id}/versions/{version}"
GETS = {
    *("/", "/health", "/ping", "/ready", "/metrics", "/info", "/models", "/models/{id}"),
    *("/models/{id}/info", "/models/{id}/health", "/status/{id}", "/v1/models", "/v1/models/{id}"),
    *("/models/ps", "/models/{id}/versions", "/tokenizer_info"),
    *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/{id}", "/v2/models/{id}/ready"),
    *(VERSION, f"{VERSION}/ready", "/v2/models/{id}/config", "/v2/models/{id}/stats"),
}
POSTS = {
    *("/", "/v1", "/invocations", "/models/{id}", TASK, "/pipeline/{task}/{id}"),
    *("/v1/embeddings", "/embeddings", "/models/{id}/v1/embeddings"),
    *("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/tokenize", "/decode"),
    *("/detokenize", "/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/v1/embed", "/v2/embed"),
    *("/v2/models/{id}/infer", f"{VERSION}/infer", "/v2/repository/index"),
    *("/v2/repository/models/{id}/load", "/v2/repository/models/{id}/unload"),
    *("/models", "/models/{id}/load", "/models/{id}/unload", "/models/{id}/promote"),
}
ROUTES = {"get": GETS, "post": POSTS}


@pytest.fixture(scope="module")
def document(cluster: Cluster) -> dict[str, Any]:
    reply = httpx.get(f"{cluster.url}/openapi.json", timeout=30)
    assert reply.headers["content-type"] == "application/json"
    document: dict[str, Any] = reply.json()
    return document


def test_document_is_valid_and_has_every_route(document: dict[str, Any]) -> None:
    validate(document)
    paths = document["paths"]
    assert not {(m, p) for m, due in ROUTES.items() for p in due if m not in paths.get(p, {})}


def test_page_loads_no_external_files(cluster: Cluster) -> None:
    page = httpx.get(f"{cluster.url}/docs", timeout=30)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    linked = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert linked
    for link in linked:
        assert not link.startswith(("http:", "https:", "//"))
        address = httpx.URL(f"{cluster.url}/docs").join(link)
        assert link.startswith("data:") or httpx.get(address, timeout=30).status_code == 200
