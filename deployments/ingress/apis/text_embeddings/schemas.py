"""Request bodies and responses of text-embeddings-inference's API. Unknown keys are ignored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import orjson
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel
from pydantic_core import PydanticCustomError

# pydantic rejects typing.TypedDict before Python 3.12.
from typing_extensions import TypedDict

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import DTYPE_NAMES, Device, ModelHead
from deployments.ingress.http.api import LENIENT
from deployments.ingress.http.request_fields import RawOptions
from deployments.ingress.token_ids import TextsOrIds
from deployments.tasks.base import TextParameters
from deployments.tasks.embedding import EmbeddingParameters, SimilarityInput, SimilarityParameters
from deployments.tasks.inputs import Many, NonEmptyText, require_text, union_of

POOLING_NAMES = {"last": "lasttoken"}


def _check_segments(texts: list[str]) -> list[str]:
    if len(texts) > 2:
        raise PydanticCustomError(
            "pair",
            "a list of texts is one text or one pair; the maximum is 2. "
            "Send a batch as a list of such lists",
        )
    require_text(*texts)
    return texts


def _select_prediction(value: Any) -> str:
    if not isinstance(value, list):
        return "text"
    return "many" if value and isinstance(value[0], list) else "pair"


TextOrPair = Annotated[Many[str], AfterValidator(_check_segments)]
Predictions = union_of(
    _select_prediction, text=NonEmptyText, pair=TextOrPair, many=Many[TextOrPair]
)


class EmbedBody(EmbeddingParameters):
    """Body of `/embed`: texts or token ids."""

    model_config = LENIENT

    inputs: TextsOrIds
    model: str | None = None
    options: RawOptions = None


class PromptedBody(SimilarityParameters):
    """Body of `/embed_all` and `/embed_sparse`: texts or token ids."""

    model_config = LENIENT

    inputs: TextsOrIds
    model: str | None = None
    options: RawOptions = None


class PredictBody(TextParameters):
    """Body of `/predict`: `["a", "b"]` is one pair, `[["a"], ["b"]]` two texts."""

    model_config = LENIENT

    inputs: Predictions  # type: ignore[valid-type]
    raw_scores: bool | None = None
    model: str | None = None
    options: RawOptions = None


class SimilarityBody(BaseModel):
    model_config = LENIENT

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None
    model: str | None = None
    options: RawOptions = None


class SparseValue(TypedDict):
    """A token id of the vocabulary and its weight, above 0."""

    index: int
    value: float


class TeiInfo(TypedDict):
    """Fields of a TEI server for the default model, and the configured models."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int | None  # null: encoders have limits of their own, which change at runtime
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    models: list[dict[str, Any]]


def model_type(manifest: ArtifactManifest) -> dict[str, Any]:
    """Return TEI's model type; the name of the task if TEI has none."""
    if manifest.pooling is not None:
        return {"embedding": {"pooling": POOLING_NAMES.get(manifest.pooling, manifest.pooling)}}
    if manifest.head is not ModelHead.LABELS:
        return {manifest.tasks[0]: {}}
    labels = manifest.labels
    maps = {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }
    return {"reranker" if len(labels) == 1 else "classifier": maps}


def model_dtype(manifest: ArtifactManifest) -> str:
    """Return the data type of the compiled variant for the CPU, else of the first variant."""
    candidate = manifest.candidate_for(Device.CPU) or manifest.candidates[0]
    return DTYPE_NAMES.get(candidate.precision, candidate.precision)


def task_parameters(body: TextParameters, kind: type[TextParameters]) -> dict[str, Any]:
    """Return the fields of `body` that are in `kind`. `truncate` is true by default."""
    parameters = body.model_dump(include=set(kind.model_fields), exclude_none=True)
    return {"truncate": True, **parameters}


def text_or_pair(item: str | list[Any]) -> str | dict[str, str]:
    """Convert an input of `/predict` to an input of text classification."""
    if isinstance(item, str):
        return item
    return item[0] if len(item) == 1 else {"text": item[0], "text_pair": item[1]}


def encode_sparse_vectors(vectors: Iterable[dict[str, NDArray[Any]]]) -> bytes:
    """Encode the value of the task sparse-embeddings as JSON: one list of SparseValue per text.

    The dicts of a maximal answer would take 260 MB, and orjson lets no other thread run until it
    returns. So encode one vector at a time.
    """
    return b"[%b]" % b",".join(map(_encode_sparse_vector, vectors))


def _encode_sparse_vector(vector: dict[str, NDArray[Any]]) -> bytes:
    pairs = zip(vector["indices"].tolist(), vector["values"], strict=True)
    values: list[SparseValue] = [{"index": index, "value": value} for index, value in pairs]
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
