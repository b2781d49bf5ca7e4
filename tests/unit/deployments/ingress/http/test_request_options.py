from __future__ import annotations

from typing import Any

import pytest

from deployments.artifacts.types import Device
from deployments.errors import InvalidField, ServeError, UnknownParameter
from deployments.ingress.http.request_options import RequestOptions, read_options


@pytest.mark.parametrize(
    ("body", "headers", "options"),
    [
        (None, {}, RequestOptions()),
        ({}, {}, RequestOptions()),
        ({"use_cache": None}, {}, RequestOptions()),
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
        ({"use_gpu": None}, {"x-use-gpu": "1"}, RequestOptions(use_gpu=True)),
        ({"hardware": None}, {"x-use-gpu": "1"}, RequestOptions(use_gpu=True)),
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
        (None, {"x-hardware": "abacus"}, InvalidField, "options.hardware"),
    ],
)
def test_invalid_option_is_named(
    body: Any, headers: dict[str, str], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as raised:
        read_options(body, headers)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("options", "device"),
    [
        (RequestOptions(), None),
        (RequestOptions(use_gpu=False), None),
        (RequestOptions(use_gpu=True), Device.GPU),
        (RequestOptions(hardware="gpu"), Device.GPU),
        (RequestOptions(hardware="cpu"), Device.CPU),
        (RequestOptions(hardware="cpu", use_gpu=True), Device.CPU),
    ],
)
def test_hardware_overrides_use_gpu(options: RequestOptions, device: Device | None) -> None:
    assert options.device is device
