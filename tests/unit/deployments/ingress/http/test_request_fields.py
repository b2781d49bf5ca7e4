from __future__ import annotations

from typing import Any

import orjson
import pytest
from starlette.requests import Request

from deployments.errors import InvalidField, ServeError, UnknownParameter
from deployments.ingress.http.bodies import BODY_KEY
from deployments.ingress.http.request_fields import (
    read_options,
    set_options_source,
    waits_for_model,
)
from deployments.ingress.request_options import RequestOptions


@pytest.mark.parametrize(
    ("body", "headers", "options"),
    [
        (None, {}, RequestOptions()),
        ({}, {}, RequestOptions()),
        ({"use_cache": None}, {}, RequestOptions()),
        (
            {"retry_on_error": False, "dont_load_model": True, "fetch": {}, "use_cache": False},
            {},
            RequestOptions(use_cache=False),
        ),
        ({"signal": {}}, {"x-use-gpu": "1"}, RequestOptions(use_gpu=True)),
        ({"use_cache": False}, {}, RequestOptions(use_cache=False)),
        ({"wait_for_model": True}, {}, RequestOptions(wait_for_model=True)),
        (None, {"x-use-cache": "false"}, RequestOptions(use_cache=False)),
        (None, {"x-use-cache": "0"}, RequestOptions(use_cache=False)),
        (None, {"x-wait-for-model": "1"}, RequestOptions(wait_for_model=True)),
        (None, {"x-use-gpu": " True "}, RequestOptions(use_gpu=True)),
        (None, {"x-hardware": "GPU"}, RequestOptions(hardware="gpu")),
        (None, {"x-hardware": " cpu "}, RequestOptions(hardware="cpu")),
        ({"use_gpu": False}, {"x-use-gpu": "true"}, RequestOptions(use_gpu=False)),
        ({"use_gpu": True}, {"x-use-cache": "0"}, RequestOptions(use_gpu=True, use_cache=False)),
        ({"hardware": "cpu"}, {"x-hardware": "gpu"}, RequestOptions(hardware="cpu")),
        ({"use_gpu": False}, {"x-hardware": "gpu"}, RequestOptions(use_gpu=False)),
        (None, {"x-compute": " Auto"}, RequestOptions(compute="auto")),
        ({"compute": "gpu"}, {"x-compute": "cpu"}, RequestOptions(compute="gpu")),
        ({"use_gpu": True}, {"x-compute": "auto"}, RequestOptions(use_gpu=True)),
        ({"compute": "auto"}, {"x-use-gpu": "true"}, RequestOptions(compute="auto")),
        ({"use_gpu": None}, {"x-use-gpu": "1"}, RequestOptions(use_gpu=True)),
        ({"hardware": None}, {"x-use-gpu": "1"}, RequestOptions(use_gpu=True)),
        ({"deadline_ms": 250}, {"x-request-timeout-ms": "9"}, RequestOptions(deadline_ms=250)),
        (None, {"x-request-timeout-ms": " 1.5 "}, RequestOptions(deadline_ms=1.5)),
        (None, {"x-stainless-read-timeout": "600"}, RequestOptions(deadline_ms=600_000)),
        (None, {"x-stainless-timeout": "60"}, RequestOptions(deadline_ms=60_000)),
        (None, {"x-stainless-timeout": "None"}, RequestOptions()),
        (None, {"x-stainless-timeout": "1e308"}, RequestOptions()),
        (
            {"use_cache": False},
            {"x-stainless-read-timeout": "2.5"},
            RequestOptions(use_cache=False, deadline_ms=2_500),
        ),
        (
            None,
            {"x-stainless-read-timeout": "600", "x-request-timeout-ms": "50"},
            RequestOptions(deadline_ms=50),
        ),
        (None, {"x-priority": "Batch"}, RequestOptions(priority="batch")),
        (
            {"priority": "interactive"},
            {"x-priority": "batch"},
            RequestOptions(priority="interactive"),
        ),
    ],
)
def test_body_options_override_headers(
    body: Any, headers: dict[str, str], options: RequestOptions
) -> None:
    assert read_options(body, headers) == options


@pytest.mark.parametrize(
    ("body", "headers", "error", "field"),
    [
        ([], {}, InvalidField, "options"),
        ("fast", {}, InvalidField, "options"),
        ({"use_gpu": "yes"}, {}, InvalidField, "options.use_gpu"),
        ({"use_gpu": 1}, {}, InvalidField, "options.use_gpu"),
        ({"hardware": "tpu"}, {}, InvalidField, "options.hardware"),
        ({"use_gpus": True}, {}, UnknownParameter, "options.use_gpus"),
        (None, {"x-use-gpu": "maybe"}, InvalidField, "x-use-gpu"),
        (None, {"x-hardware": "abacus"}, InvalidField, "x-hardware"),
        (None, {"x-compute": "tpu"}, InvalidField, "x-compute"),
        ({"compute": "tpu"}, {}, InvalidField, "options.compute"),
        (None, {"x-request-timeout-ms": "soon"}, InvalidField, "x-request-timeout-ms"),
        (None, {"x-request-timeout-ms": "-1"}, InvalidField, "x-request-timeout-ms"),
        ({"deadline_ms": 0}, {}, InvalidField, "options.deadline_ms"),
        (None, {"x-priority": "vip"}, InvalidField, "x-priority"),
    ],
)
def test_invalid_option_is_named(
    body: Any, headers: dict[str, str], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as raised:
        read_options(body, headers)
    assert raised.value.field == field


@pytest.mark.parametrize("header", ["x-compute", "x-hardware", "x-priority"])
def test_error_of_a_header_names_the_allowed_words(header: str) -> None:
    allowed = {
        "x-compute": "`auto`, `cpu`, `gpu`",
        "x-hardware": "`cpu`, `gpu`",
        "x-priority": "`interactive`, `batch`",
    }[header]
    with pytest.raises(InvalidField, match=f"`{header}` must be one of {allowed}"):
        read_options(None, {header: "tpu"})


def test_timeout_of_an_openai_client_does_not_end_a_stream() -> None:
    headers = {"x-stainless-read-timeout": "5"}
    assert read_options(None, headers, streams=True) == RequestOptions()
    assert read_options({"use_cache": True}, headers, streams=True).deadline_ms is None


@pytest.mark.parametrize(
    ("body", "header", "waits"),
    [
        ({}, None, False),
        ({}, "1", True),
        ({"options": {"wait_for_model": True}}, None, True),
        ({"options": {"wait_for_model": False}}, "true", False),
        ({"options": {"wait_for_model": None}}, "true", True),
        ({"options": {}}, "true", True),
        ({"options": None}, "true", True),
        (["a"], "true", True),
    ],
)
def test_request_waits_as_its_options_say(body: Any, header: str | None, waits: bool) -> None:
    request = build_request(orjson.dumps(body), header)
    assert waits_for_model(request) is waits


@pytest.mark.parametrize(
    ("json", "waits"),
    [
        (b'{"parameters": {"wait_for_model": false}}', False),
        (b'{"options": {"wait_for_model": false}}', True),
        (b"{", True),
    ],
)
def test_options_may_be_elsewhere_in_the_body(json: bytes, waits: bool) -> None:
    request = build_request(json + b"tensors", "true")
    set_options_source(request, json, "parameters")
    assert waits_for_model(request) is waits


def build_request(body: bytes, wait_header: str | None) -> Request:
    headers = [] if wait_header is None else [(b"x-wait-for-model", wait_header.encode())]
    return Request({"type": "http", "headers": headers, BODY_KEY: body})
