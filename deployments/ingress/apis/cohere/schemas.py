"""Request bodies and responses of Cohere's embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from deployments.ingress.apis.shared.base64_vectors import encode_base64
from deployments.ingress.apis.shared.truncation_words import TruncationWord, parse_truncation_word
from deployments.ingress.http.api import LENIENT
from deployments.ingress.http.request_fields import RawOptions
from deployments.tasks.embedding import InputType
from deployments.tasks.inputs import Many, NonEmptyText

# Neither int8 nor uint8: their scales come from a calibration, which checkpoints do not have.
EmbeddingType: TypeAlias = Literal["float", "base64", "binary", "ubinary"]

# Fields of an InferenceRequest and their names in the body, for errors.
EMBED_FIELDS = {
    "inputs": "texts",
    "parameters.dimensions": "output_dimension",
    "parameters.": "",
}


class CohereEmbedBody(BaseModel):
    """Body of `/v1/embed` and `/v2/embed`. Unknown keys are ignored, as in Cohere's API."""

    model_config = LENIENT

    texts: Many[NonEmptyText]
    model: str | None = None
    options: RawOptions = None
    input_type: InputType | None = None
    embedding_types: Many[EmbeddingType] | None = None
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    # NONE refuses long texts. Cohere's default is END, here the side that the model truncates.
    truncate: TruncationWord | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the task."""
        given = {"input_type": self.input_type, "dimensions": self.output_dimension}
        named = {name: value for name, value in given.items() if value is not None}
        if self.truncate is not None:
            named |= parse_truncation_word(self.truncate)
        return {"normalize": True, "truncate": True, **named}


class EmbeddingsByType(TypedDict):
    """The embeddings of all texts, once for each type of the request."""

    float: NotRequired[list[list[float]]]
    base64: NotRequired[list[str]]  # of little-endian float32
    binary: NotRequired[list[list[int]]]  # `ubinary` less 128
    ubinary: NotRequired[list[list[int]]]  # the signs of eight numbers in a byte, the first highest


class CohereEmbedResponse(TypedDict):
    """Response of `/v1/embed` and `/v2/embed`."""

    id: str
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    # A list on `/v1/embed` without `embedding_types`.
    embeddings: EmbeddingsByType | list[list[float]]
    texts: list[str]
    meta: dict[str, Any]  # API version and token counts


def encode_embeddings(
    rows: NDArray[np.float32], types: Sequence[EmbeddingType]
) -> dict[EmbeddingType, Any]:
    """Encode the embeddings `rows` [texts, dimensions] in each of `types`."""
    return {name: _ENCODERS[name](rows) for name in types}


def _encode_ubinary(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.packbits(rows > 0, axis=1)


def _encode_binary(rows: NDArray[np.float32]) -> NDArray[np.int8]:
    return (_encode_ubinary(rows).astype(np.int16) - 128).astype(np.int8)


_ENCODERS: Mapping[EmbeddingType, Callable[[NDArray[np.float32]], Any]] = {
    "float": lambda rows: rows,
    "base64": encode_base64,
    "binary": _encode_binary,
    "ubinary": _encode_ubinary,
}
