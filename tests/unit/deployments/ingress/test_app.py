from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.artifacts import EMBEDDER
from tests.support.fakes import FailingEncoder
from tests.support.in_process import InProcess


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/no/such/path", 404, "route_not_found"),
        ("POST", "/no/such/path", 404, "route_not_found"),
        ("DELETE", f"/models/{EMBEDDER}", 405, "method_not_allowed"),
        ("PUT", "/", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", f"/pipeline/feature-extraction/{EMBEDDER}", 405, "method_not_allowed"),
    ],
)
async def test_what_no_route_takes_is_told_as_hugging_face_clients_read_it(
    method: str, path: str, status: int, code: str, tiny_store: Path
) -> None:
    async with InProcess(tiny_store).client() as http:
        reply = await http.request(method, path)
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert isinstance(reply.json()["error"], str)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/poems", 404, "route_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("GET", "/v1/embeddings", 405, "method_not_allowed"),
        ("GET", "/embeddings", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_what_no_route_takes_under_v1_is_told_as_openai_clients_read_it(
    method: str, path: str, status: int, code: str, tiny_store: Path
) -> None:
    async with InProcess(tiny_store).client() as http:
        reply = await http.request(method, path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [f"/models/{EMBEDDER}", "/v1/embeddings", "/embeddings/"])
async def test_a_bug_is_logged_whole_and_told_without_details(
    path: str, tiny_store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = InProcess(tiny_store, encoder=FailingEncoder(KeyError("internals")), raise_bugs=False)
    in_openai_words = "/embeddings" in path
    body = {"input": "a"} if in_openai_words else {"inputs": "a"}
    async with broken.client() as http:
        reply = await http.post(path, json=body)
    assert reply.status_code == 500
    assert "unexpected failure" in reply.text
    assert "internals" not in reply.text
    told = reply.json()["error"]["code"] if in_openai_words else reply.json()["code"]
    assert told == "internal"
    (logged,) = [r for r in caplog.records if r.levelno == logging.ERROR and r.exc_info]
    assert "internals" in str(logged.exc_info[1])
