"""Request body and response of `/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, WithJsonSchema, model_validator

from deployments.ingress.apis.shared.base64_vectors import encode_base64
from deployments.ingress.apis.shared.token_usage import Usage
from deployments.ingress.apis.shared.truncation_words import (
    TRUNCATION_WORDS,
    parse_truncation_word,
)
from deployments.ingress.apis.shared.unsupported_fields import UnsupportedFields
from deployments.ingress.http.api import LENIENT, build_schema
from deployments.ingress.http.request_fields import RawOptions
from deployments.tasks.embedding import EmbeddingParameters

UNSUPPORTED_EMBEDDING_FIELDS: UnsupportedFields = {
    "output_dtype": (("float",), "vectors are floats here; /v2/embed has `embedding_types`"),
    "embedding_type": (("float",), "send `encoding_format`; /v2/embed has `embedding_types`"),
    "late_chunking": ((False,), "omit it"),
    "truncate_prompt_tokens": ((-1,), "send `truncate`; the limit is that of the model"),
    "add_special_tokens": ((True,), "omit it"),
}
# Fields of an InferenceRequest and their names in the body, for errors.
EMBEDDING_FIELDS = {"inputs": "input", "parameters.": ""}


class EmbeddingsRequest(EmbeddingParameters):
    """Body of `/v1/embeddings`. Unknown keys are ignored, as in OpenAI's API."""

    model_config = LENIENT

    # Validated later, by the task or `parse_token_ids`. Their errors name the invalid element.
    input: Annotated[
        Any, WithJsonSchema(build_schema(str | list[str] | list[int] | list[list[int]]))
    ]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
    options: RawOptions = None
    # Names of Voyage and NVIDIA for `dimensions` and `truncate`.
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    truncation: bool | None = None
    # Fields of other servers that change the vectors; rejected, unless they have no effect.
    output_dtype: Any = None
    embedding_type: Any = None
    late_chunking: Any = None
    truncate_prompt_tokens: Any = None
    add_special_tokens: Any = None

    @model_validator(mode="before")
    @classmethod
    def _read_side(cls, body: Any) -> Any:
        """Read a `truncate` of NVIDIA, which names the end that is cut, or none."""
        word = body.get("truncate") if isinstance(body, dict) else None
        return {**body, **parse_truncation_word(word)} if word in TRUNCATION_WORDS else body

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the task. `normalize` and `truncate` are true by default."""
        names = set(EmbeddingParameters.model_fields)
        given = self.model_dump(include=names, exclude_none=True, exclude_unset=True)
        aliases = {"dimensions": self.output_dimension, "truncate": self.truncation}
        renamed = {name: value for name, value in aliases.items() if value is not None}
        return {"normalize": True, "truncate": True, **renamed, **given}


class EmbeddingObject(BaseModel):
    """An embedding: a list of numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(BaseModel):
    """Response of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: Usage


def build_embedding_objects(rows: NDArray[np.float32], encoding: str) -> list[dict[str, Any]]:
    """Build one object per row of `rows` [texts, dimensions]."""
    embeddings = rows if encoding == "float" else encode_base64(rows)
    return [
        {"object": "embedding", "index": i, "embedding": embedding}
        for i, embedding in enumerate(embeddings)
    ]
