"""Routes of Cohere's API, except rerank.

POST /v1/embed  /models/{id}/v1/embed
POST /v2/embed  /models/{id}/v2/embed
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deployments.artifacts.types import TaskName
from deployments.errors import InvalidField
from deployments.ingress.apis.cohere.schemas import (
    EMBED_FIELDS,
    CohereEmbedBody,
    CohereEmbedResponse,
    encode_embeddings,
)
from deployments.ingress.apis.shared.cohere_forms import (
    COHERE_ERROR_FORMAT,
    build_cohere_meta,
    read_api_version,
)
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.inference_requests import build_inference_request
from deployments.ingress.apis.shared.response_headers import (
    INFERENCE_HEADERS,
    inference_headers,
)
from deployments.ingress.http.api import Access, Operation, build_schema, parse_body
from deployments.ingress.http.bodies import json_response, read_json_object
from deployments.ingress.http.errors import rename_error_fields


class CohereRoutes:
    """Handlers of Cohere's embeddings."""

    name: ClassVar = "Cohere"
    error_format: ClassVar = COHERE_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline

    def operations(self) -> Sequence[Operation]:
        paths = ("/v1/embed", "/v2/embed")
        return (
            Operation(
                method="POST",
                paths=(*paths, *(f"/models/{{id:path}}{path}" for path in paths)),
                handler=self.embed,
                summary="Embed texts",
                access=Access.INFER,
                body=build_schema(CohereEmbedBody),
                response=build_schema(CohereEmbedResponse),
                examples={
                    "a search query": {"texts": ["What purrs?"], "input_type": "search_query"},
                    "bits": {"texts": ["A cat.", "A kitten."], "embedding_types": ["ubinary"]},
                },
                runs_model=True,
                headers=INFERENCE_HEADERS,
            ),
        )

    async def embed(self, request: Request) -> Response:
        """Return the embeddings by type; on version 1 a list if the request names no types."""
        raw = await read_json_object(request, self._pipeline.settings.limits)
        for name in ("images", "inputs"):
            if raw.get(name) is not None:
                raise InvalidField(
                    f"`{name}` is not supported: models here embed `texts`", field=name
                )
        body = parse_body(CohereEmbedBody, raw)
        with rename_error_fields(EMBED_FIELDS):
            response = await self._pipeline.infer(
                build_inference_request(
                    request, body, body.texts, TaskName.FEATURE_EXTRACTION, body.parameters
                )
            )
        version = read_api_version(request)
        rows, types = response.result.value, body.embedding_types
        is_list = version == "1" and types is None
        meta = build_cohere_meta(version, response.result.timings.tokens)
        content = {
            "id": str(uuid.uuid4()),
            "response_type": "embeddings_floats" if is_list else "embeddings_by_type",
            "embeddings": rows if is_list else encode_embeddings(rows, types or ["float"]),
            "texts": body.texts,
            "meta": {**meta, "billed_units": meta["tokens"]},
        }
        return json_response(content, headers=inference_headers(response))
