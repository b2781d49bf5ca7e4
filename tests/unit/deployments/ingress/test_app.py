from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from starlette.requests import Request
from starlette.responses import Response

from deployments.artifacts.types import TaskName
from deployments.errors import ServeError
from deployments.ingress import app
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.http.api import Access, ErrorFormat, Operation
from deployments.ingress.http.bodies import json_response, read_json_object
from deployments.ingress.http.request_fields import model_in_path
from deployments.ingress.requests import InferenceRequest
from tests.support.artifacts import CLASSIFIER, EMBEDDER
from tests.support.fakes import FailingEncoder
from tests.support.in_process import InProcess


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/no/such/path", 404, "route_not_found"),
        ("POST", "/no/such/path", 404, "route_not_found"),
        ("PUT", f"/models/{EMBEDDER}", 405, "method_not_allowed"),
        ("PUT", "/", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", f"/pipeline/feature-extraction/{EMBEDDER}", 405, "method_not_allowed"),
    ],
)
async def test_unmatched_route_answers_in_the_default_error_format(
    method: str, path: str, status: int, code: str, tiny_store: Path
) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.request(method, path)
    assert (response.status_code, response.json()["code"]) == (status, code)
    assert isinstance(response.json()["error"], str)


async def test_unknown_route_has_the_error_format_of_its_family_and_names_it(
    tiny_store: Path,
) -> None:
    async with InProcess(tiny_store).client() as http:
        openai = await http.post("/v1/poems", json={"input": "a"})
        open_inference = await http.get("/v2/poems")
    assert openai.status_code == open_inference.status_code == 404
    error = openai.json()["error"]
    assert error["code"] == "route_not_found"
    assert error["message"] == (
        "no route matches /v1/poems; there are /v1/chat/completions, /v1/completions, "
        "/v1/embed, /v1/embeddings, /v1/messages, /v1/messages/count_tokens, /v1/models, "
        "/v1/rerank, /v1/responses, /v1/responses/input_tokens, /v1/score; see /docs"
    )
    assert "/v2/repository/index" in open_inference.json()["error"]


@pytest.mark.parametrize(
    ("path", "meant", "error_type"),
    [
        ("/chat/completions", "/v1/chat/completions", "invalid_request_error"),
        ("/responses", "/v1/responses", "invalid_request_error"),
        ("/messages", "/v1/messages", "not_found_error"),
        ("/v1/v1/messages", "/v1/messages", "not_found_error"),
    ],
)
async def test_path_with_a_wrong_base_url_names_the_right_one(
    path: str, meant: str, error_type: str, tiny_store: Path
) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post(path, json={"messages": []})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (404, error_type)
    assert error["message"] == f"no route matches {path}; there is {meant}; see /docs"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("GET", "/v1/embeddings", 405, "method_not_allowed"),
        ("GET", "/v1/responses", 405, "method_not_allowed"),
        ("GET", "/v1/responses/resp_1", 404, "response_not_found"),
        ("DELETE", "/v1/responses/resp_1", 404, "response_not_found"),
        ("POST", "/v1/responses/compact", 404, "compaction_unsupported"),
        ("POST", f"/models/{EMBEDDER}/v1/responses/compact", 404, "compaction_unsupported"),
        ("POST", "/v1/responses/resp_1", 404, "response_not_found"),
        ("GET", "/embeddings", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_wrong_method_of_an_openai_route_answers_in_its_error_format(
    method: str, path: str, status: int, code: str, tiny_store: Path
) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [f"/models/{EMBEDDER}", "/v1/embeddings", "/embeddings/"])
async def test_unexpected_failure_is_logged_and_answered_without_details(
    path: str, tiny_store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = InProcess(tiny_store, encoder=FailingEncoder(KeyError("internals")), raise_bugs=False)
    in_openai_words = "/embeddings" in path
    body = {"input": "a"} if in_openai_words else {"inputs": "a"}
    async with broken.client() as http:
        response = await http.post(path, json=body)
    assert response.status_code == 500
    assert "unexpected failure" in response.text
    assert "internals" not in response.text
    code = response.json()["error"]["code"] if in_openai_words else response.json()["code"]
    assert code == "internal"
    (logged,) = [r for r in caplog.records if r.levelno == logging.ERROR and r.exc_info]
    assert "internals" in str(logged.exc_info[1])


async def test_healthz_answers_as_health(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        health, healthz = await http.get("/health"), await http.get("/healthz")
    assert (
        (healthz.status_code, healthz.json())
        == (health.status_code, health.json())
        == (
            200,
            {"status": "ok"},
        )
    )


def toy_error_response(error: ServeError) -> Response:
    return json_response({"toy_error": error.message}, status=error.status)


class ToyRoutes:
    """An API with one operation: return how many labels a model gives a text."""

    name: ClassVar = "Toy"
    error_format: ClassVar = ErrorFormat("Toy", toy_error_response)

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                method="POST",
                paths=("/toy/{id:path}",),
                handler=self.count_labels,
                summary="Count labels",
                access=Access.INFER,
                body={"type": "object"},
                response={"type": "object"},
                runs_model=True,
            ),
        )

    async def count_labels(self, request: Request) -> Response:
        body = await read_json_object(request, self._pipeline.settings.limits)
        response = await self._pipeline.infer(
            InferenceRequest(
                inputs=body.get("text"),
                model_id=model_in_path(request),
                task=TaskName.TEXT_CLASSIFICATION,
            )
        )
        return json_response({"labels": len(response.result.value)})


async def test_registered_api_is_served_documented_and_uses_its_error_format(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "APIS", (ToyRoutes, *app.APIS))
    async with InProcess(tiny_store).client() as http:
        counted = await http.post(f"/toy/{CLASSIFIER}", json={"text": "a"})
        unknown_model = await http.post("/toy/no/such", json={"text": "a"})
        wrong_method = await http.get("/toy/model")
        document = (await http.get("/openapi.json")).json()
    assert (counted.status_code, counted.json()) == (200, {"labels": 1})
    assert unknown_model.status_code == 404
    assert "does not exist" in unknown_model.json()["toy_error"]
    assert wrong_method.status_code == 405
    assert "GET" in wrong_method.json()["toy_error"]
    operation = document["paths"]["/toy/{id}"]["post"]
    assert operation["x-access"] == "infer"
    assert operation["responses"]["404"]["content"]["application/json"]["schema"]


async def test_every_documented_operation_declares_its_access(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    access = {path: {m: o["x-access"] for m, o in item.items()} for path, item in paths.items()}
    assert access["/healthz"] == {"get": "public"}
    assert access["/v1/chat/completions"] == {"post": "infer"}
    assert access["/metrics"] == {"get": "metrics"}
    assert {a for item in access.values() for a in item.values()} == set(Access)
