"""Bodies and answers of ranking and classification, as several services have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from deployments.ingress.apis.openai.embeddings import Usage
from deployments.ingress.http.api import LENIENT
from deployments.tasks.inputs import Many, NonEmptyText, one_or_many, text_or
from deployments.tasks.ranking import RankedText, RankingParameters
from deployments.tasks.text_classification import LabelScore


class TextsBody(RankingParameters):
    """The body of `/rerank` in text-embeddings-inference's dialect."""

    model_config = LENIENT

    query: NonEmptyText
    texts: Many[NonEmptyText]
    model: str | None = None


class RerankDocument(BaseModel):
    """A document in an object; only its text is read."""

    model_config = LENIENT

    text: NonEmptyText


class DocumentsBody(BaseModel):
    """The body of `/rerank` as Cohere, Jina and Infinity write it."""

    model_config = LENIENT

    query: NonEmptyText
    documents: Many[text_or(RerankDocument)]  # type: ignore[valid-type]
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None  # by default all
    return_documents: bool | None = None
    raw_scores: bool | None = None
    # For clients that send it; documents are cut to what the model reads, which is less.
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None


class ClassifyBody(BaseModel):
    """The body of Infinity's `/classify`."""

    model_config = LENIENT

    input: one_or_many(NonEmptyText)  # type: ignore[valid-type]  # a type made by a function
    model: str | None = None
    raw_scores: bool | None = None


class DocumentText(TypedDict):
    """A document given back."""

    text: str


class RankedDocument(TypedDict):
    """A document by its place in the request, and how well it answers the query."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentText | str]  # `/rerank` gives the bare text, as Infinity


class RerankEnvelope(TypedDict):
    """What an answer says of itself."""

    id: str
    created: int  # seconds since the epoch
    model: str
    usage: Usage


class RerankResponse(RerankEnvelope):
    """The answer where `documents` were sent."""

    object: Literal["rerank"]
    results: list[RankedDocument]
    meta: dict[str, Any]  # Cohere's: the version of its API, and tokens


class ClassifyResponse(RerankEnvelope):
    """The answer of `/classify`."""

    object: Literal["classify"]
    data: list[list[LabelScore]]


def document_text(document: str | RerankDocument) -> str:
    """What of a document is ranked."""
    return document if isinstance(document, str) else document.text


def build_ranked_document(
    ranked: RankedText, shown: list[str] | None, *, bare: bool
) -> RankedDocument:
    """One result, with its document where documents are `shown`; `bare` without an object."""
    told = RankedDocument(index=ranked["index"], relevance_score=ranked["score"])
    if shown is not None:
        text = shown[ranked["index"]]
        told["document"] = text if bare else DocumentText(text=text)
    return told
