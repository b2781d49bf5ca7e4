"""Bodies and answers of `/v1/embeddings`."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, WithJsonSchema
from typing_extensions import TypedDict

from deployments.ingress.http.api import LENIENT, schema_of
from deployments.ingress.http.request_options import RequestOptions
from deployments.ingress.service import InferenceResponse
from deployments.tasks.embedding import EmbeddingParameters

# What our own request calls differently.
EMBEDDING_FIELDS = {"inputs": "input", "parameters.": ""}


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


class EmbeddingObject(BaseModel):
    """One vector; base64 holds little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(TypedDict):
    """Tokens read, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: Usage


def build_usage(reply: InferenceResponse) -> Usage:
    """What an answer took; nothing is written, so all tokens are the prompt's."""
    tokens = reply.result.timings.tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def build_embedding_objects(rows: NDArray[np.float32], encoding: str) -> list[dict[str, Any]]:
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
