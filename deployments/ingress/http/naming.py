"""Which model a request means."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from deployments.errors import InvalidField

# What clients write in `model` when their user gave none: huggingface_hub, its 0.2x, Infinity.
FILLERS = frozenset({"dummy", "tgi", "-", "default", "default/not-specified"})


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
    if not model or model in FILLERS or model.startswith(("http://", "https://")):
        return None
    return model
