"""Options and model id of a request, read from its body and headers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, get_args

import orjson
from pydantic import WithJsonSchema
from starlette.requests import Request

from deployments.artifacts.types import Device
from deployments.config import Compute
from deployments.errors import InvalidField
from deployments.ingress.http.api import build_schema
from deployments.ingress.http.bodies import BODY_KEY
from deployments.ingress.request_options import HARDWARE_HEADERS, NO_OPTIONS, RequestOptions
from deployments.messages import PRIORITIES
from deployments.request_headers import OPTION_HEADERS, SDK_TIMEOUT_HEADERS
from deployments.tasks.inputs import parse_parameters

TRUE_WORDS = {"1", "true"}
FALSE_WORDS = {"0", "false"}
REQUIRED_WORD = "required"
# The field `options` of a body. `read_options` validates it together with the headers.
RawOptions = Annotated[Any, WithJsonSchema(build_schema(RequestOptions))]
HARDWARE_KEYS = frozenset(HARDWARE_HEADERS)
# Options whose header is one of several words, and the allowed words.
HEADER_WORDS: Mapping[str, Sequence[str]] = {
    "hardware": [device.value for device in Device],
    "compute": get_args(Compute),
    "priority": PRIORITIES,
}
# All options except `legacy_format`, which only the Hugging Face API has.
OPTION_NAMES = frozenset({*OPTION_HEADERS.values(), *HARDWARE_KEYS})
# Options of huggingface.js 2 for itself. It sends all its options, with values of any type.
CLIENT_OPTIONS = frozenset({"retry_on_error", "dont_load_model", "signal", "fetch"})


def read_options(body: Any, headers: Mapping[str, str], *, streams: bool = False) -> RequestOptions:
    """Read `options` of the body. Headers set options that the body omits.

    The timeout headers of OpenAI's and Anthropic's clients set a deadline, unless the answer is a
    stream or the request has another deadline. CLIENT_OPTIONS have no effect. Raises InvalidField
    or UnknownParameter.
    """
    if body is not None and not isinstance(body, dict):
        raise InvalidField("`options` must be an object", field="options")
    present = [(name, headers[name]) for name in OPTION_HEADERS if name in headers]
    timeout = next((headers[name] for name in SDK_TIMEOUT_HEADERS if name in headers), None)
    body = {key: value for key, value in (body or {}).items() if key not in CLIENT_OPTIONS}
    if not body:
        if not present and timeout is None:
            return NO_OPTIONS
        return _parse_headers(tuple(present), None if streams else timeout)
    # Any hardware option of the body overrides all hardware headers.
    in_body = {key for key, value in body.items() if value is not None}
    in_body |= HARDWARE_KEYS if HARDWARE_KEYS & in_body else set()
    from_headers = _parse_headers(
        tuple((name, text) for name, text in present if OPTION_HEADERS[name] not in in_body),
        None if streams or "deadline_ms" in in_body else timeout,
    )
    options = {**body, **from_headers.model_dump(exclude_none=True)}
    return parse_parameters(RequestOptions, options, path="options")


@lru_cache(1_024)  # a client sends the same headers with each request
def _parse_headers(present: tuple[tuple[str, str], ...], timeout: str | None) -> RequestOptions:
    options: dict[str, Any] = {}
    if timeout is not None and (timeout_ms := _parse_positive(timeout, 1000)) is not None:
        options["deadline_ms"] = timeout_ms
    for header, text in present:
        options.update(_parse_header(header, OPTION_HEADERS[header], text.strip().lower()))
    return parse_parameters(RequestOptions, options, path="options")


def _parse_positive(text: str, factor: int = 1) -> float | None:
    """Return the number in `text` times `factor`; None if it is not positive and finite."""
    try:
        number = float(text) * factor
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _parse_header(header: str, key: str, word: str) -> dict[str, Any]:
    if key in HEADER_WORDS:
        if word not in HEADER_WORDS[key]:
            allowed = ", ".join(f"`{one}`" for one in HEADER_WORDS[key])
            raise InvalidField(f"header `{header}` must be one of {allowed}", field=header)
        return {key: word}
    if key == "deadline_ms":
        deadline_ms = _parse_positive(word)
        if deadline_ms is None:
            raise InvalidField(
                f"header `{header}` must be a positive number of milliseconds", field=header
            )
        return {key: deadline_ms}
    if key == "use_gpu" and word == REQUIRED_WORD:
        return {"require_gpu": True}
    if word not in TRUE_WORDS | FALSE_WORDS:
        also = f", `{REQUIRED_WORD}`" if key == "use_gpu" else ""
        raise InvalidField(f"header `{header}` must be `true` or `false`{also}", field=header)
    return {key: word in TRUE_WORDS}


OPTIONS_SOURCE_KEY = "hundredfold.options_source"


def set_options_source(request: Request, json: bytes, key: str) -> None:
    """Make `waits_for_model` read the options under `key` of `json`, a part of the body."""
    request.scope[OPTIONS_SOURCE_KEY] = (json, key)


def waits_for_model(request: Request) -> bool:
    """Return whether a request sets `wait_for_model` in its headers or in a body already read."""
    whole_body = (request.scope.get(BODY_KEY, b""), "options")
    json, key = request.scope.get(OPTIONS_SOURCE_KEY, whole_body)
    in_body = None
    with suppress(orjson.JSONDecodeError, KeyError, TypeError):
        in_body = orjson.loads(json)[key]["wait_for_model"]
    if in_body is not None:
        return in_body is True
    return request.headers.get("x-wait-for-model", "").strip().lower() in TRUE_WORDS


# Values of `model` that clients send if the user names no model: those of huggingface_hub, of its
# 0.2x releases, of Infinity's client, and of the examples of text-embeddings-inference.
PLACEHOLDER_MODELS = frozenset(
    {"dummy", "tgi", "tei", "text-embeddings-inference", "-", "default", "default/not-specified"}
)


def read_model_name(request: Request, model: Any) -> str | None:
    """Return the model id in the path, else the body's `model` as `model_in_body` reads it."""
    return model_in_path(request) or model_in_body(model)


def model_in_path(request: Request) -> str | None:
    """Return the model id in the path, or None. The id may contain slashes."""
    model_id: str | None = request.path_params.get("id")
    return model_id


def model_in_body(model: Any) -> str | None:
    """Return the body's `model`; None for null, an empty string, a placeholder or a URL.

    Clients send the URL of the server where they have no model name. Raises InvalidField for a
    value that is not a string.
    """
    if model is not None and not isinstance(model, str):
        raise InvalidField("`model` must be a string", field="model")
    if not model or model in PLACEHOLDER_MODELS or model.startswith(("http://", "https://")):
        return None
    return model
