"""The model patterns of a key bind every route: those that name a model, and those that list."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.artifacts.types import TaskName
from deployments.config import BuildSettings, IngressUserConfig
from deployments.grpc_status import INFERENCE_SERVICE, STATUS_HEADER, GrpcStatus
from deployments.ingress import builds
from deployments.ingress.apis.open_inference.grpc_messages import find_type, frame_message
from deployments.ingress.http.api import Access
from deployments.ingress.http.application import HttpApplication
from deployments.ingress.http.router import OperationRoute
from deployments.keys.key import Scope
from tests.support.artifacts import CLASSIFIER, EMBEDDER, seal_tiny
from tests.support.in_process import InProcess
from tests.support.keys import add_key, bearer

FOREIGN = CLASSIFIER
STORED, FOREIGN_STORED = "tiny/stored", "other/stored"  # not configured, so they load on demand
FOREIGN_REJECTED = "other/rejected"  # configured, but not in the store
PARAMETERS = {"version": "1", "task": TaskName.TEXT_CLASSIFICATION}
INDEX = "/v2/repository/index"  # read by POST, as in Triton
# Routes that list models, and the other routes that are read without a model.
LISTS = {INDEX, "/stats", "/v2/models/stats", "/models/ps", "/v1/models", "/models", "/info"}
NAME_NO_MODEL = {"/metrics", "/usage", "/tokenizer_info"}


@pytest.fixture
def foreign_key(tmp_path: Path) -> str:
    return add_key(tmp_path / "keys.json", "other")


@pytest.fixture
def key(tmp_path: Path) -> str:
    """Return a key with every scope, but neither for FOREIGN nor for FOREIGN_STORED."""
    models = (EMBEDDER, STORED)
    return add_key(tmp_path / "keys.json", "bound", scopes=tuple(Scope), models=models)


@pytest.fixture
async def app(tmp_path: Path, foreign_key: str, key: str) -> AsyncIterator[HttpApplication]:
    for model_id in (EMBEDDER, STORED, FOREIGN_STORED):
        seal_tiny(tmp_path, model_id)
    seal_tiny(tmp_path, FOREIGN, labels=("NEGATIVE", "POSITIVE"))
    settings = IngressUserConfig(
        key_file=tmp_path / "keys.json", builds=BuildSettings(allow_pull=True)
    )
    models = (EMBEDDER, FOREIGN, FOREIGN_REJECTED)
    async with InProcess(tmp_path, models, settings=settings).application() as app:
        yield app


@pytest.fixture
async def http(
    app: HttpApplication, foreign_key: str, key: str
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client with `key`. FOREIGN is loaded and was used, so that lists could name it."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers=bearer(key)
    ) as http:
        run = {"json": {"inputs": "a"}, "headers": bearer(foreign_key)}
        assert (await http.post(f"/models/{FOREIGN}", **run)).status_code == 200
        yield http


def keyed_routes(app: HttpApplication) -> list[tuple[str, OperationRoute]]:
    """Return the method and the route of every operation that needs a key."""
    routes = [route for route in app.table.routes if route.operation.access is not Access.PUBLIC]
    return [(*(route.methods - {"HEAD"}), route) for route in routes]


async def read_examples(http: httpx.AsyncClient) -> dict[str, Any]:
    """Return a valid body of each path of the OpenAPI document that has one, without `model`."""
    bodies = {}
    for path, methods in (await http.get("/openapi.json")).json()["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        for example in content.get("application/json", {}).get("examples", {}).values():
            bodies[path] = {k: v for k, v in example["value"].items() if k != "model"}
    return bodies


@pytest.mark.parametrize("name", [FOREIGN, f"{FOREIGN}@latest"])
async def test_model_patterns_bind_every_way_to_a_model(
    name: str, app: HttpApplication, http: httpx.AsyncClient
) -> None:
    examples = await read_examples(http)
    checked = 0
    for method, route in keyed_routes(app):
        template = re.sub(r":\w+\}", "}", route.path)
        # No response is stored, so these routes are 404 for every model and read none.
        if "{id}" not in template or "{response_id}" in template:
            continue
        body = {"json": examples.get(template, {})} if method == "POST" else {}
        refused = await http.request(method, template.format(id=name, **PARAMETERS), **body)
        assert refused.status_code == 403, (method, template, refused.text)
        assert "does not permit" in refused.text, template
        checked += 1
    assert checked > 50


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": FOREIGN, "input": "a"}),
        ("/v1/chat/completions", {"model": FOREIGN, "messages": []}),
        ("/models/no/such", {"inputs": "a"}),
        ("/models", {"source": FOREIGN}),
        ("/tokenize", {"model": FOREIGN, "prompt": "a"}),
        ("/detokenize", {"model": FOREIGN, "tokens": [1]}),
    ],
)
async def test_a_foreign_model_in_a_body_is_refused(
    path: str, body: dict[str, Any], http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "has_compiler", lambda: True)  # nothing is built
    refused = await http.post(path, json=body)
    assert refused.status_code == 403, refused.text
    assert "does not permit" in refused.text


async def test_a_foreign_model_in_a_query_is_refused(http: httpx.AsyncClient) -> None:
    refused = await http.get("/tokenizer_info", params={"model": FOREIGN})
    assert refused.status_code == 403, refused.text
    assert (await http.get("/tokenizer_info", params={"model": EMBEDDER})).status_code == 200


@pytest.mark.parametrize(
    ("method", "field"),
    [("ModelReady", "name"), ("ModelMetadata", "name"), ("ModelInfer", "model_name")],
)
async def test_a_foreign_model_in_a_call_is_refused(
    method: str, field: str, http: httpx.AsyncClient
) -> None:
    call = frame_message(find_type(f"{method}Request")(**{field: FOREIGN}))
    headers = {"content-type": "application/grpc", "te": "trailers"}
    refused = await http.post(f"{INFERENCE_SERVICE}{method}", content=call, headers=headers)
    assert refused.headers[STATUS_HEADER] == str(int(GrpcStatus.PERMISSION_DENIED))


async def read_list(http: httpx.AsyncClient, path: str) -> httpx.Response:
    return await http.request("POST" if path == INDEX else "GET", path)


async def test_no_list_names_a_foreign_model(app: HttpApplication, http: httpx.AsyncClient) -> None:
    assert (await http.post(f"/models/{EMBEDDER}", json={"inputs": "a"})).status_code == 200
    fixed = [(method, r.path) for method, r in keyed_routes(app) if "{" not in r.path]
    reading = {path for method, path in fixed if method == "GET"}
    assert reading | {INDEX} == LISTS | NAME_NO_MODEL
    for path in sorted(LISTS):
        listed = await read_list(http, path)
        assert listed.status_code == 200, path
        assert EMBEDDER in listed.text, path
        for foreign in (FOREIGN, FOREIGN_STORED, FOREIGN_REJECTED):
            assert foreign not in listed.text, path


@pytest.mark.parametrize("path", ["/v1/models", INDEX])
async def test_lists_of_the_store_name_what_the_key_permits(
    path: str, http: httpx.AsyncClient
) -> None:
    assert STORED in (await read_list(http, path)).text


async def test_defaults_are_models_that_the_key_permits(http: httpx.AsyncClient) -> None:
    # /predict defaults to the first classifier that the key permits, but this key permits none.
    refused = await http.post("/predict", json={"inputs": "a"})
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_field")
