"""Options of a request, from its body and headers, and the model it names."""

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
REQUIRED_WORD = "required"


class RequestOptions(BaseModel):
    """`options` of the Hugging Face body. null means "not given"."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    use_cache: bool | None = None
    wait_for_model: bool | None = None
    use_gpu: bool | None = None  # a hint: the CPU computes where no GPU is available
    require_gpu: bool | None = None
    hardware: Literal["cpu", "gpu"] | None = None
    # Zero-shot responses in the format for clients older than mid-2025, whatever the user agent.
    legacy_format: bool | None = None

    @property
    def device(self) -> Device | None:
        """The requested device; `hardware` wins."""
        if self.hardware is not None:
            return Device(self.hardware)
        return Device.GPU if self.use_gpu or self.require_gpu else None

    @property
    def requires_device(self) -> bool:
        """Whether the request fails without the device."""
        return self.hardware is not None or bool(self.require_gpu)


NO_OPTIONS = RequestOptions()

# Headers for APIs whose bodies have no options.
HEADERS = {
    "x-use-cache": "use_cache",
    "x-wait-for-model": "wait_for_model",
    "x-use-gpu": "use_gpu",
    "x-hardware": "hardware",
}
HARDWARE_KEYS = {"use_gpu", "require_gpu", "hardware"}
OPTION_NAMES = frozenset({*HEADERS.values(), *HARDWARE_KEYS})  # those of every API


def read_options(body: Any, headers: Mapping[str, str]) -> RequestOptions:
    """Read `options` of the body; headers fill in what the body omits.

    Raises InvalidField or UnknownParameter.
    """
    if body is not None and not isinstance(body, dict):
        raise InvalidField("`options` must be an object", field="options")
    body = body or {}
    if not body and not any(header in headers for header in HEADERS):
        return NO_OPTIONS
    # Any hardware option of the body overrides all hardware headers.
    in_body = {key for key, value in body.items() if value is not None}
    in_body |= HARDWARE_KEYS if HARDWARE_KEYS & in_body else set()
    from_headers: dict[str, Any] = {}
    for header, key in HEADERS.items():
        if key not in in_body and (text := headers.get(header)) is not None:
            from_headers.update(_parse_header(header, key, text.strip().lower()))
    return parse_parameters(RequestOptions, {**body, **from_headers}, path="options")


def _parse_header(header: str, key: str, word: str) -> dict[str, Any]:
    if key == "hardware":
        return {key: word}
    if key == "use_gpu" and word == REQUIRED_WORD:
        return {"require_gpu": True}
    if word not in TRUE_WORDS | FALSE_WORDS:
        also = f", `{REQUIRED_WORD}`" if key == "use_gpu" else ""
        raise InvalidField(f"header `{header}` must be `true` or `false`{also}", field=header)
    return {key: word in TRUE_WORDS}


# `model` of clients whose user named none: huggingface_hub, its 0.2x releases, Infinity.
PLACEHOLDER_MODELS = frozenset({"dummy", "tgi", "-", "default", "default/not-specified"})


def model_in_path(request: Request) -> str | None:
    """Return the model id in the path, which may contain slashes."""
    model_id: str | None = request.path_params.get("id")
    return model_id


def model_in_body(model: Any) -> str | None:
    """Return the body's `model`; None for null, a placeholder or the server's own address.

    Raises InvalidField.
    """
    if model is not None and not isinstance(model, str):
        raise InvalidField("`model` must be a string", field="model")
    if not model or model in PLACEHOLDER_MODELS or model.startswith(("http://", "https://")):
        return None
    return model
