"""Requests for encoder models, from bodies that name a model and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from starlette.requests import Request

from deployments.ingress.http.request_fields import read_model_name, read_options
from deployments.ingress.requests import InferenceRequest


class InferenceBody(Protocol):
    """A parsed body, of any API."""

    @property
    def model(self) -> str | None: ...

    @property
    def options(self) -> Any: ...  # `read_options` validates them


def build_inference_request(
    request: Request,
    body: InferenceBody,
    inputs: Any,
    task: str | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> InferenceRequest:
    """Build the request for the model and with the options that path, body and headers name.

    `inputs` and `parameters` are those of the task. Raises InvalidField or UnknownParameter.
    """
    return InferenceRequest(
        inputs=inputs,
        model_id=read_model_name(request, body.model),
        task=task,
        parameters=parameters or {},
        options=read_options(body.options, request.headers),
    )
