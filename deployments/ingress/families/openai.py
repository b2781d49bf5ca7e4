"""OpenAI's API: embeddings and the list of models.

POST /v1/embeddings  /embeddings  /models/{id}/v1/embeddings
POST /v1/chat/completions  /v1/completions      refused: nothing here generates text
POST /models/{id}/v1/chat/completions  ...      likewise
GET  /v1/models  /v1/models/{id}
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from deployments.errors import InvalidField, ServeError, WrongTask
from deployments.ingress.families.model_list import model_facts, model_list
from deployments.ingress.http.api import LENIENT, Operation, parse_body, schema_of
from deployments.ingress.http.codec import json_response, read_json_object
from deployments.ingress.http.naming import model_in_body, model_in_path
from deployments.ingress.http.options import RequestOptions, read_options
from deployments.ingress.http.replies import reply_headers, retry_headers
from deployments.ingress.http.wording import fields_called
from deployments.ingress.service import InferenceService, Question, Reply
from deployments.ingress.tokens import with_ids_told_apart
from deployments.manifest import TaskName
from deployments.tasks.embedding import EmbeddingParameters

GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")
# What our own request calls differently.
NAMES = {"inputs": "input", "parameters.": ""}


class EmbeddingsRequest(EmbeddingParameters):
    """The body of `/v1/embeddings`. Keys it does not name are not for us, as with OpenAI."""

    model_config = LENIENT

    # Told apart, and validated with the place of what is wrong, by the task.
    input: Annotated[Any, WithJsonSchema(schema_of(str | list[str] | list[int] | list[list[int]]))]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
    options: Annotated[Any, WithJsonSchema(schema_of(RequestOptions))] = None

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of the task; vectors have length 1 unless `normalize` says otherwise."""
        given = self.model_dump(include=set(EmbeddingParameters.model_fields), exclude_none=True)
        return {"normalize": True, **given}


class Embedding(BaseModel):
    """One vector; base64 holds little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(TypedDict):
    """Tokens read, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class OpenAIRoutes:
    """Handlers of the family."""

    name: ClassVar = "OpenAI"

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    def operations(self) -> Sequence[Operation]:
        """The per-model form must stand before the Hugging Face family's greedy path."""
        return (
            Operation(
                method="POST",
                paths=("/v1/embeddings", "/embeddings", "/models/{id:path}/v1/embeddings"),
                handler=self.embeddings,
                summary="Embeddings of texts",
                body=schema_of(EmbeddingsRequest),
                answer=schema_of(Embeddings),
                examples={"two texts": {"input": ["A cat.", "A kitten."]}},
                infers=True,
            ),
            Operation(
                method="POST",
                paths=(*GENERATION_PATHS, *(f"/models/{{id:path}}{p}" for p in GENERATION_PATHS)),
                handler=self.generate,
                summary="Refused: no model here generates text",
                body={"type": "object"},
            ),
            Operation(
                method="GET",
                paths=("/v1/models",),
                handler=self.models,
                summary="Every configured model",
                answer={"type": "object"},
            ),
            Operation(
                method="GET",
                paths=("/v1/models/{id:path}",),
                handler=self.model,
                summary="One model",
                answer={"type": "object"},
            ),
        )

    def owns(self, path: str) -> bool:
        """Whatever has `/v1/` in it, and the short form."""
        return "/v1/" in path or path == "/embeddings"

    async def embeddings(self, request: Request) -> Response:
        """Embeddings of `input`, always of length 1 unless `normalize` says otherwise."""
        limits = self._service.settings.limits
        body = parse_body(EmbeddingsRequest, await read_json_object(request, limits))
        if body.input is None:
            raise InvalidField("`input` is required", field="input")
        with fields_called(NAMES):
            reply = await self._service.answer(
                Question(
                    inputs=with_ids_told_apart(body.input),
                    model_id=model_in_path(request) or model_in_body(body.model),
                    task=TaskName.FEATURE_EXTRACTION,
                    parameters=body.parameters,
                    options=read_options(body.options, request.headers),
                )
            )
        return json_response(
            {
                "object": "list",
                "data": embedding_objects(reply.answer.value, body.encoding_format or "float"),
                "model": reply.model.ref.id,
                "usage": usage_of(reply),
            },
            headers=reply_headers(reply),
        )

    async def generate(self, request: Request) -> Response:
        """Refused, naming what the model asked for can do."""
        body = await read_json_object(request, self._service.settings.limits)
        named = model_in_path(request) or model_in_body(body.get("model"))
        if named is None:
            raise WrongTask("No model here generates text; `/v1/models` tells what each can do")
        model = self._service.registry.find(named)
        known = ", ".join(f"`{task}`" for task in model.tasks)
        raise WrongTask(f"Model {named} generates no text; it can do: {known}", field="model")

    async def models(self, request: Request) -> Response:
        """Every configured model."""
        return json_response(model_list(self._service))

    async def model(self, request: Request) -> Response:
        """One model."""
        found = self._service.registry.find(model_in_path(request) or "")
        return json_response(model_facts(found, self._service.board))

    def error_response(self, error: ServeError) -> Response:
        """OpenAI's error object; its clients pick the exception class by status."""
        # Its clients retry every 5xx twice unless told; most of ours would fail the same way again.
        headers = {**retry_headers(error), "x-should-retry": str(error.retryable).lower()}
        body = {"error": error_object(error)}
        return json_response(body, status=error.status, headers=headers)


def usage_of(reply: Reply) -> Usage:
    """What an answer took; nothing is written, so all tokens are the prompt's."""
    tokens = reply.answer.timings.tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def error_object(error: ServeError) -> dict[str, str | None]:
    """What an error says, under OpenAI's names."""
    kind = "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status >= 500:
        kind = "server_error"
    return {"message": error.message, "type": kind, "param": error.field, "code": error.code}


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
