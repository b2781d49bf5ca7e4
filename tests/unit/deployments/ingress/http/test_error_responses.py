"""Tests of REFUSAL_HEADER. HAProxy repeats refusals with this header to similar requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.errors import (
    EngineFailed,
    Overloaded,
    RateLimited,
    ServeError,
    build_overloaded,
)
from deployments.request_headers import REFUSAL_HEADER
from deployments.transports.channel import codec
from tests.support.artifacts import EMBEDDER
from tests.support.fakes import FailingEncoder
from tests.support.in_process import InProcess

EMBED = f"/models/{EMBEDDER}"
INFER = f"/v2/models/{EMBEDDER}/infer"
TENSORS = [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["night"]}]


async def is_marked(
    store: Path, path: str, body: dict[str, Any], error: ServeError, **headers: str
) -> bool:
    """Return whether the response has REFUSAL_HEADER if the replica raises `error`."""
    async with InProcess(store, encoder=FailingEncoder(error)).client() as http:
        response = await http.post(path, json=body, headers=headers)
    assert response.status_code == error.status, response.text
    return REFUSAL_HEADER in response.headers


@pytest.mark.parametrize(
    ("path", "body", "marked"),
    [
        (EMBED, {"inputs": "night"}, True),
        (EMBED, {"inputs": "night", "options": {"use_cache": False}}, True),
        (EMBED, {"inputs": 'say "priority" and "timeout"'}, True),
        (EMBED, {"inputs": "night", "options": {"deadline_ms": 900}}, False),
        (EMBED, {"inputs": "night", "options": {"priority": "batch"}}, False),
        ("/v1/embeddings", {"input": "night"}, True),
        ("/v1/embeddings", {"input": "night", "options": {"deadline_ms": 900}}, False),
        ("/embed", {"inputs": "night"}, True),
        (INFER, {"inputs": TENSORS}, True),
        (INFER, {"inputs": TENSORS, "parameters": {"timeout": 900_000}}, False),
        (INFER, {"inputs": TENSORS, "parameters": {"priority": 2}}, False),
    ],
)
async def test_refusal_is_marked_unless_the_body_decides_about_the_queue(
    path: str, body: dict[str, Any], marked: bool, tiny_store: Path
) -> None:
    assert await is_marked(tiny_store, path, body, build_overloaded("full", 1.0)) is marked


async def test_refusal_is_marked_if_headers_decide_about_the_queue(tiny_store: Path) -> None:
    headers = {"x-request-timeout-ms": "900", "x-priority": "batch"}
    error = build_overloaded("full", 1.0)
    assert await is_marked(tiny_store, EMBED, {"inputs": "a"}, error, **headers)


@pytest.mark.parametrize(
    "error",
    [
        RateLimited("limit"),
        EngineFailed("the engine gave up"),
        Overloaded("no memory for large answers is free"),
    ],
)
async def test_other_errors_are_not_marked(error: ServeError, tiny_store: Path) -> None:
    assert not await is_marked(tiny_store, EMBED, {"inputs": "a"}, error)


def test_refusal_of_a_queue_stays_one_on_its_way_to_the_ingress() -> None:
    sent = codec.decode_error(codec.encode_error(build_overloaded("full", 1.0)))
    assert isinstance(sent, Overloaded)
    assert sent.from_queue
