"""Which model a request means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from deployments.artifacts.types import Device
from deployments.errors import InvalidField
from deployments.tasks.inputs import parse_parameters

TRUE_WORDS = {"1", "true"}
FALSE_WORDS = {"0", "false"}


class RequestOptions(BaseModel):
    """`options` of the Hugging Face body. null means "not given"."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    use_cache: bool | None = None
    wait_for_model: bool | None = None
    use_gpu: bool | None = None
    hardware: Literal["cpu", "gpu"] | None = None
    # Zero-shot answers in the shape clients before mid-2025 read, whatever the client says it is.
    legacy_format: bool | None = None

    @property
    def device(self) -> Device | None:
        """The hardware asked for; `hardware` is the newer spelling and wins."""
        if self.hardware is not None:
            return Device(self.hardware)
        return Device.GPU if self.use_gpu else None


# Header twins, for APIs whose bodies have no options.
HEADERS = {
    "x-use-cache": "use_cache",
    "x-wait-for-model": "wait_for_model",
    "x-use-gpu": "use_gpu",
    "x-hardware": "hardware",
}
HARDWARE_KEYS = {"use_gpu", "hardware"}


def read_options(body: Any, headers: Mapping[str, str]) -> RequestOptions:
    """`options` of the body, completed from the headers; the body wins.

    Raises InvalidField or UnknownParameter.
    """
    if body is not None and not isinstance(body, dict):
        raise InvalidField("`options` must be an object", field="options")
    body = body or {}
    # Two words for one wish: a body that says either is not to be overruled by a header.
    told = {key for key, value in body.items() if value is not None}
    told |= HARDWARE_KEYS if HARDWARE_KEYS & told else set()
    given: dict[str, Any] = {}
    for header, key in HEADERS.items():
        if key not in told and (text := headers.get(header)) is not None:
            given[key] = text.strip().lower() if key == "hardware" else _flag(header, text)
    return parse_parameters(RequestOptions, {**body, **given}, path="options")


def _flag(header: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise InvalidField(f"header `{header}` must be `true` or `false`", field=header)
    return word in TRUE_WORDS


# What clients write in `model` when their user gave none: huggingface_hub, its 0.2x, Infinity.
PLACEHOLDER_MODELS = frozenset({"dummy", "tgi", "-", "default", "default/not-specified"})


def model_in_path(request: Request) -> str | None:
    """The id in the path; it may contain slashes."""
    model_id: str | None = request.path_params.get("id")
    return model_id


def model_in_body(model: Any) -> str | None:
    """The body's `model`; None where it is null, or a filler, or the server's own address.

    Raises InvalidField.
    """
    if model is not None and not isinstance(model, str):
        raise InvalidField("`model` must be a string", field="model")
    if not model or model in PLACEHOLDER_MODELS or model.startswith(("http://", "https://")):
        return None
    return model
