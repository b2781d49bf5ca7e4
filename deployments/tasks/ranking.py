"""text-ranking: texts in the order in which they answer a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from typing_extensions import TypedDict

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead, TaskName
from deployments.tasks.base import DecodeContext, Task, TaskInput, TextParameters, build_item_paths
from deployments.tasks.embedding import add_prompt
from deployments.tasks.inputs import Inputs, Many, NonEmptyText, parse_parameters
from deployments.tasks.numbers import normalize, sigmoid

# The names under which embedding models keep the prompts of a search, as sentence-transformers
# looks for them; the first that a model has is used.
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
TEXTS_PATH = "inputs.texts"


class RankingParameters(TextParameters):
    """Parameters of text-ranking."""

    raw_scores: bool | None = None
    return_text: bool | None = None


class RankingOptions(NamedTuple):
    """How scores are told."""

    raw_scores: bool
    texts: tuple[str, ...] | None  # to be returned with their scores


class RankingInput(BaseModel):
    """A query, and the texts that may answer it."""

    query: NonEmptyText
    texts: Many[NonEmptyText]


class RankedText(TypedDict):
    """A text by its place in the request, and how well it answers the query."""

    index: int
    score: float
    text: NotRequired[str]


class TextRanking(Task):
    """Every text with its score, best first.

    A cross-encoder reads query and text together, and its one logit decides. An embedding model,
    which serves where no cross-encoder does, reads them apart and is compared by cosine.
    """

    name: ClassVar = TaskName.TEXT_RANKING
    head: ClassVar = ModelHead.LABELS
    inputs: ClassVar[Inputs[RankingInput]] = Inputs(
        RankingInput, "an object with `query` and `texts`"
    )
    parameters: ClassVar[type[TextParameters]] = RankingParameters
    response_type: ClassVar[Any] = list[RankedText]
    example: ClassVar[Mapping[str, Any]] = {
        "inputs": {"query": "A film", "texts": ["A river.", "A lovely film."]}
    }
    reads_pairs: ClassVar = True

    def fits(self, manifest: ArtifactManifest) -> bool:
        """Models that answer one score, or vectors."""
        scores = manifest.head is ModelHead.LABELS and len(manifest.labels) == 1
        return scores or manifest.head is ModelHead.VECTOR

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        """An object with `query` and `texts`."""
        return isinstance(inputs, dict) and {"query", "texts"} <= set(inputs)

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """`inputs`: {"query": text, "texts": [text, ...]}."""
        params = parse_parameters(RankingParameters, parameters)
        given = self.inputs.read(inputs)
        texts = tuple(given.texts)
        fields = build_item_paths(TEXTS_PATH, len(texts), single=False)
        options = RankingOptions(bool(params.raw_scores), texts if params.return_text else None)
        if manifest.head is ModelHead.LABELS:
            pairs = tuple((given.query, text) for text in texts)
            return TaskInput(pairs, fields, options, params.truncation, many=TEXTS_PATH)
        query = add_prompt((given.query,), _prompt(QUERY_PROMPTS, manifest), manifest)
        documents = add_prompt(texts, _prompt(DOCUMENT_PROMPTS, manifest), manifest)
        return TaskInput(
            texts=(*query, *documents),
            fields=("inputs.query", *fields),
            options=options,
            truncation=params.truncation,
            many=TEXTS_PATH,
        )

    def decode(self, context: DecodeContext, options: RankingOptions) -> list[RankedText]:
        """Highest score first, equal scores in the order of the request.

        A cosine is its own raw score.
        """
        rows = np.stack(context.rows)
        if context.manifest.head is ModelHead.VECTOR:
            units = normalize(rows)
            raw = units[1:] @ units[0]
            return _ranked(raw, raw, options.texts)
        logits = rows[:, 0]
        return _ranked(logits, logits if options.raw_scores else sigmoid(logits), options.texts)


def _ranked(
    raw: NDArray[np.float32], scores: NDArray[np.float32], texts: Sequence[str] | None
) -> list[RankedText]:
    """In the order of `raw`: far from zero, different logits have the same sigmoid."""
    ranked: list[RankedText] = []
    for i in np.argsort(-raw, kind="stable"):
        entry = RankedText(index=int(i), score=float(scores[i]))
        if texts is not None:
            entry["text"] = texts[i]
        ranked.append(entry)
    return ranked


def _prompt(names: Sequence[str], manifest: ArtifactManifest) -> str | None:
    """The first of `names` that the model has a prompt for; None leaves it at its default."""
    return next((name for name in names if name in manifest.prompts), None)
