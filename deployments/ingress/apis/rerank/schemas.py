"""Request bodies and responses of ranking and classification."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from deployments.ingress.apis.shared.token_usage import Usage
from deployments.ingress.apis.shared.unsupported_fields import UnsupportedFields
from deployments.ingress.http.api import LENIENT
from deployments.ingress.http.request_fields import RawOptions
from deployments.tasks.inputs import Many, NonEmptyText, one_or_many, text_or
from deployments.tasks.ranking import RankedText, RankingParameters
from deployments.tasks.text_classification import LabelScore


class TextsBody(RankingParameters):
    """Body of `/rerank` of text-embeddings-inference."""

    model_config = LENIENT

    query: NonEmptyText
    texts: Many[str]
    model: str | None = None
    options: RawOptions = None


class RerankDocument(BaseModel):
    """A document as an object. Keys other than `text` are ignored."""

    model_config = LENIENT

    text: str


class DocumentsBody(BaseModel):
    """Body of `/rerank` of Cohere, Jina and Infinity."""

    model_config = LENIENT

    query: NonEmptyText
    documents: Many[text_or(RerankDocument, str)]  # type: ignore[valid-type]
    model: str | None = None
    options: RawOptions = None
    top_n: Annotated[int, Field(ge=1)] | None = None  # default: all
    return_documents: bool | None = None
    raw_scores: bool | None = None
    instruction: str | None = None  # for rerankers that read one
    rank_fields: Any = None  # fields of documents to rank, joined; rejected, unless it is ["text"]
    # Ignored: documents are truncated only to the maximum length of the model.
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None


class ClassifyBody(BaseModel):
    """Body of `/classify` of Infinity."""

    model_config = LENIENT

    input: one_or_many(NonEmptyText)  # type: ignore[valid-type]  # built by a function
    model: str | None = None
    options: RawOptions = None
    raw_scores: bool | None = None


class ScoreBody(BaseModel):
    """Body of `/score` of vLLM: one text with many, or as many texts on both sides."""

    model_config = LENIENT

    text_1: one_or_many(NonEmptyText)  # type: ignore[valid-type]  # built by a function
    text_2: one_or_many(NonEmptyText)  # type: ignore[valid-type]
    model: str | None = None
    options: RawOptions = None
    instruction: str | None = None  # for rerankers that read one


UNSUPPORTED_RERANK_FIELDS: UnsupportedFields = {
    "rank_fields": ((["text"], []), "send documents that are texts"),
}


class DocumentText(TypedDict):
    text: str


class RankedDocument(TypedDict):
    """A scored document. `index` is the position of the document in the request."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentText | str]  # a string on `/rerank`, as Infinity returns it


class ScoringResponse(TypedDict):
    """Fields that rerank and classification responses share."""

    id: str
    created: int  # seconds since the epoch
    model: str
    usage: Usage


class RerankResponse(ScoringResponse):
    """Response to a body with `documents`."""

    object: Literal["rerank"]
    results: list[RankedDocument]
    meta: dict[str, Any]  # Cohere's API version and token counts


class ClassifyResponse(ScoringResponse):
    """Response of `/classify`."""

    object: Literal["classify"]
    data: list[list[LabelScore]]


class PairScore(TypedDict):
    """The score of one pair. `index` is its position in the request."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(ScoringResponse):
    """Response of `/score`."""

    object: Literal["list"]
    data: list[PairScore]


def document_text(document: str | RerankDocument) -> str:
    return document if isinstance(document, str) else document.text


def build_ranked_document(
    ranked: RankedText, texts: list[str] | None, *, bare: bool
) -> RankedDocument:
    """Build one result. It has the document if `texts` is not None.

    The document is a string if `bare`, else an object.
    """
    document = RankedDocument(index=ranked["index"], relevance_score=ranked["score"])
    if texts is not None:
        text = texts[ranked["index"]]
        document["document"] = text if bare else DocumentText(text=text)
    return document
