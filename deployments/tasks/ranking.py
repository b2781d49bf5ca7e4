"""text-ranking: texts ordered by their relevance to a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from typing_extensions import TypedDict

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead, TaskName
from deployments.errors import InvalidField
from deployments.messages import Text
from deployments.tasks.base import (
    DecodeContext,
    Task,
    TaskInput,
    TextParameters,
    TruncatingParameters,
    build_item_paths,
)
from deployments.tasks.embedding import add_prompt, compare_with_first
from deployments.tasks.inputs import Inputs, Many, NonEmptyText, parse_parameters
from deployments.tasks.numbers import sigmoid

# Prompt names of embedding models for retrieval, in the order that sentence-transformers uses. The
# first name that the model has is used.
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
TEXTS_PATH = "inputs.texts"


class RankingParameters(TruncatingParameters):
    raw_scores: bool | None = None
    return_text: bool | None = None
    # For rerankers that read one: what makes a text relevant, in words.
    instruction: str | None = None


class RankingOptions(NamedTuple):
    raw_scores: bool
    texts: tuple[str, ...] | None  # returned with the scores; None: scores only


class RankingInput(BaseModel):
    query: NonEmptyText
    texts: Many[str]  # an empty text is scored, so that the other texts get scores too


class RankedText(TypedDict):
    """The score of one text; `index` is its position in the request."""

    index: int
    score: float
    text: NotRequired[str]


class TextRanking(Task):
    """Task that returns every text with its score, best first.

    A cross-encoder reads query and text as a pair and returns one logit. If it is a decoder, it may
    also read an instruction. An embedding model reads query and text separately, and the score is
    the similarity of their vectors.
    """

    name: ClassVar = TaskName.TEXT_RANKING
    head: ClassVar = ModelHead.LABELS
    inputs: ClassVar[Inputs[RankingInput]] = Inputs(
        RankingInput, "an object with `query` and `texts`"
    )
    parameters: ClassVar[type[TextParameters]] = RankingParameters
    options_type: ClassVar[Any] = RankingOptions
    response_type: ClassVar[Any] = list[RankedText]
    example: ClassVar[Mapping[str, Any]] = {
        "inputs": {"query": "A film", "texts": ["A river.", "A lovely film."]}
    }
    reads_pairs: ClassVar = True

    def fits(self, manifest: ArtifactManifest) -> bool:
        """Return whether the model is a cross-encoder (one label) or an embedding model."""
        scores = manifest.head is ModelHead.LABELS and len(manifest.labels) == 1
        return scores or manifest.head is ModelHead.VECTOR

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        return isinstance(inputs, dict) and {"query", "texts"} <= set(inputs)

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        params = parse_parameters(RankingParameters, parameters)
        value = self.inputs.read(inputs)
        texts = tuple(value.texts)
        fields = build_item_paths(TEXTS_PATH, len(texts), single=False)
        options = RankingOptions(bool(params.raw_scores), texts if params.return_text else None)
        truncation = params.choose_truncation(manifest)
        if manifest.head is ModelHead.LABELS:
            pairs = _pair(value.query, texts, params.instruction, manifest)
            return TaskInput(
                texts=pairs,
                fields=fields,
                options=options,
                truncation=truncation,
                many=TEXTS_PATH,
                part_fields=("inputs.query", None, "parameters.instruction"),
            )
        if params.instruction is not None:
            raise _reads_no_instruction()
        query = add_prompt((value.query,), _find_prompt(QUERY_PROMPTS, manifest), manifest)
        documents = add_prompt(texts, _find_prompt(DOCUMENT_PROMPTS, manifest), manifest)
        return TaskInput(
            texts=(*query, *documents),
            fields=("inputs.query", *fields),
            options=options,
            truncation=truncation,
            many=TEXTS_PATH,
            extra=1,
        )

    def decode(self, context: DecodeContext, options: RankingOptions) -> list[RankedText]:
        """Return the texts with the highest score first, equal scores in request order.

        `raw_scores` does not change similarities.
        """
        if context.manifest.head is ModelHead.VECTOR:
            similarities = compare_with_first(context)
            return _rank_texts(similarities, similarities, options.texts)
        logits = np.array(context.rows)[:, 0]
        return _rank_texts(logits, logits if options.raw_scores else sigmoid(logits), options.texts)


def _pair(
    query: str, texts: Sequence[str], instruction: str | None, manifest: ArtifactManifest
) -> tuple[Text, ...]:
    if instruction is None:
        return tuple((query, text) for text in texts)
    template = manifest.pair_template
    if template is None or template.instruction is None:
        raise _reads_no_instruction()
    return tuple((query, text, instruction) for text in texts)


def _reads_no_instruction() -> InvalidField:
    return InvalidField(
        "`parameters.instruction` is set, and the model reads no instruction; omit it",
        field="parameters.instruction",
    )


def _rank_texts(
    raw: NDArray[np.float32], scores: NDArray[np.float32], texts: Sequence[str] | None
) -> list[RankedText]:
    """Sort by `raw`, because different large logits may have equal sigmoids."""
    ranked: list[RankedText] = []
    for i in np.argsort(-raw, kind="stable"):
        entry = RankedText(index=int(i), score=float(scores[i]))
        if texts is not None:
            entry["text"] = texts[i]
        ranked.append(entry)
    return ranked


def _find_prompt(names: Sequence[str], manifest: ArtifactManifest) -> str | None:
    """Return the first of `names` that the model has; None selects the model's default prompt."""
    return next((name for name in names if name in manifest.prompts), None)
