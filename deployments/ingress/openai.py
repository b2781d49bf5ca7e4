"""OpenAI's API: embeddings and the list of models.

POST /v1/embeddings  /embeddings  /models/{id}/v1/embeddings
GET  /v1/models  /v1/models/{id}
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deployments.errors import InvalidField, ServeError
from deployments.ingress.codec import json_response, read_json_object
from deployments.ingress.huggingface import model_id_of, reply_headers, retry_headers
from deployments.ingress.models import model_facts, model_list
from deployments.ingress.options import read_options
from deployments.ingress.service import InferenceService, Question
from deployments.manifest import TaskName
from deployments.tasks.embedding import EmbeddingParameters

ENCODINGS = ("float", "base64")


class OpenAIRoutes:
    """Handlers of the family."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """The per-model form must stand before the Hugging Face family's greedy path."""
        return [
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/embeddings", self.embeddings, methods=["POST"]),
            Route("/models/{id:path}/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{id:path}", self.model, methods=["GET"]),
        ]

    async def embeddings(self, request: Request) -> Response:
        """Embeddings of `input`, always of length 1 unless `normalize` says otherwise."""
        body = await read_json_object(request, self._service.settings.limits.body_bytes)
        encoding = body.get("encoding_format") or "float"
        if encoding not in ENCODINGS:
            raise InvalidField(
                "`encoding_format` must be `float` or `base64`", field="encoding_format"
            )
        try:
            reply = await self._service.answer(
                Question(
                    inputs=texts_of(body),
                    model_id=model_id_of(request) or model_named(body),
                    task=TaskName.FEATURE_EXTRACTION,
                    parameters=parameters_of(body),
                    options=read_options(body.get("options"), request.headers),
                )
            )
        except ServeError as error:
            raise in_openai_words(error) from error
        tokens = reply.answer.timings.tokens
        return json_response(
            {
                "object": "list",
                "data": embedding_objects(reply.answer.value, encoding),
                "model": reply.model.ref.id,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            },
            headers=reply_headers(reply),
        )

    async def list_models(self, request: Request) -> Response:
        """Every configured model."""
        return json_response(model_list(self._service))

    async def model(self, request: Request) -> Response:
        """One model."""
        found = self._service.registry.find(model_id_of(request) or "")
        return json_response(model_facts(found, self._service.board))


def texts_of(body: Mapping[str, Any]) -> str | list[str]:
    """`input` as texts. Raises InvalidField, also for token ids, which belong to a tokenizer."""
    value = body.get("input")
    if value is None:
        raise InvalidField("`input` is required", field="input")
    if isinstance(value, list) and value and type(value[0]) in (int, list):
        raise InvalidField(
            "`input` holds token ids; send text, this model's tokenizer is not OpenAI's",
            field="input",
        )
    texts: str | list[str] = value
    return texts


def model_named(body: Mapping[str, Any]) -> str | None:
    """`model` of the body; None when absent or empty. Raises InvalidField."""
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidField("`model` must be a string", field="model")
    return model or None


def parameters_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The task's parameters among the body's keys; other keys are not for us, as with OpenAI."""
    given = {key: body[key] for key in EmbeddingParameters.model_fields if key in body}
    return {"normalize": True, **given}


def in_openai_words(error: ServeError) -> ServeError:
    """A copy with `inputs` and `parameters.x` named as this API names them.

    A copy, because requests that share a computation get one and the same error.
    """
    if error.field is None:
        return error
    field = error.field.removeprefix("parameters.")
    if field.startswith("inputs"):
        field = "input" + field.removeprefix("inputs")
    reworded = copy.copy(error)
    reworded.message = error.message.replace(f"`{error.field}", f"`{field}")
    reworded.field = field
    return reworded


def embedding_objects(rows: NDArray[np.float32], encoding: str) -> list[dict[str, Any]]:
    """One object per row [dimensions]; base64 holds little-endian float32."""
    return [
        {
            "object": "embedding",
            "index": i,
            "embedding": row
            if encoding == "float"
            else base64.b64encode(row.astype("<f4").tobytes()).decode(),
        }
        for i, row in enumerate(rows)
    ]


def error_response(error: ServeError) -> Response:
    """OpenAI's error object; its clients pick the exception class by status."""
    kind = "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status >= 500:
        kind = "server_error"
    detail = {
        "message": error.message,
        "type": kind,
        "param": error.field,
        "code": error.code,
    }
    # Its clients retry every 5xx twice unless told; most of ours would fail the same way again.
    headers = {**retry_headers(error), "x-should-retry": str(error.retryable).lower()}
    return json_response({"error": detail}, status=error.status, headers=headers)
