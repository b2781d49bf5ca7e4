"""Bodies and answers of text-embeddings-inference's API. Keys they do not name are not for us."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Discriminator, Tag
from pydantic_core import PydanticCustomError

# Before Python 3.12 this is the only TypedDict that pydantic, which documents answers, reads.
from typing_extensions import TypedDict

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device, ModelHead
from deployments.ingress.http.api import LENIENT
from deployments.ingress.tokenization import IdsOrMany, TextsOrIds, TokenizedText
from deployments.tasks.base import TextParameters
from deployments.tasks.embedding import EmbeddingParameters, SimilarityInput, SimilarityParameters
from deployments.tasks.inputs import Many, NonEmptyText, one_or_many

# Branches of unions; see tasks/inputs.py for their brackets.
_TEXT, _PAIR, _MANY = "<text>", "<pair>", "<many>"

DTYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
POOLING_NAMES = {"last": "lasttoken"}


def _at_most_a_pair(texts: list[str]) -> list[str]:
    if len(texts) > 2:
        raise PydanticCustomError(
            "pair",
            "a list of texts is one text or one pair, and has no more than two; "
            "a batch is a list of such lists",
        )
    return texts


def _prediction_tag(value: Any) -> str:
    if not isinstance(value, list):
        return _TEXT
    return _MANY if value and isinstance(value[0], list) else _PAIR


TextOrPair = Annotated[Many[NonEmptyText], AfterValidator(_at_most_a_pair)]
Predictions = Annotated[
    Annotated[NonEmptyText, Tag(_TEXT)]
    | Annotated[TextOrPair, Tag(_PAIR)]
    | Annotated[Many[TextOrPair], Tag(_MANY)],
    Discriminator(_prediction_tag),
]


class EmbedBody(EmbeddingParameters):
    """The body of `/embed`: texts, or token ids."""

    model_config = LENIENT

    inputs: TextsOrIds
    model: str | None = None


class EmbedAllBody(SimilarityParameters):
    """The body of `/embed_all`: texts, or token ids."""

    model_config = LENIENT

    inputs: TextsOrIds
    model: str | None = None


class PredictBody(TextParameters):
    """The body of `/predict`: `["a", "b"]` is one pair, `[["a"], ["b"]]` two texts."""

    model_config = LENIENT

    inputs: Predictions
    raw_scores: bool | None = None
    model: str | None = None


class SimilarityBody(BaseModel):
    """The body of `/similarity`."""

    model_config = LENIENT

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None
    model: str | None = None


class TokenizeBody(BaseModel):
    """The body of `/tokenize`."""

    model_config = LENIENT

    inputs: one_or_many(NonEmptyText)  # type: ignore[valid-type]  # a type made by a function
    add_special_tokens: bool | None = None  # by default they are added
    prompt_name: str | None = None
    model: str | None = None


class DecodeBody(BaseModel):
    """The body of `/decode`: the token ids of one text, or of several."""

    model_config = LENIENT

    ids: IdsOrMany
    skip_special_tokens: bool | None = None  # by default they are left out
    model: str | None = None


class SimpleToken(TypedDict):
    """One token; `start` and `stop` count characters, and special tokens stand nowhere."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TeiInfo(TypedDict):
    """What one server of text-embeddings-inference says of itself; and all models of this one."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int | None  # encoders have their own, which change while they run
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    models: list[dict[str, Any]]


def model_type(manifest: ArtifactManifest) -> dict[str, Any]:
    """The kind of model in TEI's words, in ours where it has none."""
    if manifest.head is ModelHead.VECTOR:
        pooling = manifest.pooling or "mean"
        return {"embedding": {"pooling": POOLING_NAMES.get(pooling, pooling)}}
    if manifest.head is not ModelHead.LABELS:
        return {manifest.tasks[0].value: {}}
    labels = manifest.labels
    maps = {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }
    return {"reranker" if len(labels) == 1 else "classifier": maps}


def model_dtype(manifest: ArtifactManifest) -> str:
    """The numbers that the model computes with, on a CPU where it has a graph for one."""
    candidate = manifest.candidate_for(Device.CPU) or manifest.candidates[0]
    return DTYPE_NAMES.get(candidate.precision, candidate.precision)


def task_parameters(body: TextParameters, kind: type[TextParameters]) -> dict[str, Any]:
    """The parameters of a task that stand in the body. Long texts are cut unless it says no."""
    given = body.model_dump(include=set(kind.model_fields), exclude_none=True)
    return {"truncate": True, **given}


def text_or_pair(given: str | list[Any]) -> str | dict[str, str]:
    """One input of `/predict` as text-classification takes it."""
    if isinstance(given, str):
        return given
    return given[0] if len(given) == 1 else {"text": given[0], "text_pair": given[1]}


def build_simple_tokens(spelled: TokenizedText) -> list[SimpleToken]:
    """A text's tokens, each with its part of the text."""
    special = spelled.tokens.special
    rows = zip(spelled.tokens.ids.tolist(), spelled.tokens.offsets.tolist(), strict=True)
    return [
        {"id": token_id, "text": special[i], "special": True, "start": None, "stop": None}
        if i in special
        else {
            "id": token_id,
            "text": spelled.text[start:stop],
            "special": False,
            "start": start,
            "stop": stop,
        }
        for i, (token_id, (start, stop)) in enumerate(rows)
    ]
