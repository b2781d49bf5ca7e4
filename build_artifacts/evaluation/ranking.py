"""Evaluation of text-ranking: ranks of the relevant documents of each query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from build_artifacts.errors import UnsupportedModel
from build_artifacts.evaluation.base import (
    EvaluatedModel,
    Evaluation,
    ExampleSampling,
    Output,
    ReducedOutput,
    tokenize_texts,
)
from build_artifacts.evaluation.files import FileLocation, Record, as_index, read_objects, shorten
from build_artifacts.evaluation.metrics import ndcg, rank_documents, reciprocal_rank
from deployments.messages import TokenizedItem

EXPECTED = "JSON lines with `query`, `documents` and `relevant` (indices into `documents`)"
NDCG_DEPTH = 10


@dataclass(frozen=True, slots=True)
class RankedQuery:
    """A query, its documents, and the indices of the relevant documents."""

    query: str
    documents: tuple[str, ...]
    relevant: frozenset[int]


def load_ranking(path: Path, model: EvaluatedModel, sampling: ExampleSampling) -> Evaluation:
    """Load one item per pair of query and document.

    Raises BadEvaluationData for an unusable file and UnsupportedModel for a model with several
    labels.
    """
    if len(model.labels) > 1:
        raise UnsupportedModel(
            f"text-ranking requires a model with one label; this model has {len(model.labels)}",
            hint="omit `--eval`",
        )
    queries = sampling.sample(
        [_parse_query(record) for record in read_objects(FileLocation(path, EXPECTED))]
    )
    pairs = [(query.query, document) for query in queries for document in query.documents]
    return RankingEvaluation(tokenize_texts(model, pairs), queries)


def _parse_query(record: Record) -> RankedQuery:
    documents = record.texts("documents")
    relevant = set[int]()
    for value in record.require_list("relevant"):
        index = as_index(value, len(documents))
        if index is None:
            raise record.data_error(
                f"`{shorten(value)}` is not an index into {len(documents)} documents", "relevant"
            )
        relevant.add(index)
    return RankedQuery(record.text("query"), tuple(documents), frozenset(relevant))


class RankingEvaluation(Evaluation):
    """Evaluation by `mrr`. Items are the documents of query 0, then of query 1, and so on."""

    def __init__(self, items: Sequence[TokenizedItem], queries: Sequence[RankedQuery]) -> None:
        super().__init__(items, "mrr")
        self._queries = queries

    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        """Return the means of `mrr` (over all ranks) and `ndcg@10` over the queries."""
        scores = [float(values[0]) for values in reduced]
        orders: list[list[bool]] = []
        start = 0
        for query in self._queries:
            end = start + len(query.documents)
            orders.append(rank_documents(scores[start:end], query.relevant))
            start = end
        return {
            "mrr": float(np.mean([reciprocal_rank(order) for order in orders])),
            f"ndcg@{NDCG_DEPTH}": float(np.mean([ndcg(order, NDCG_DEPTH) for order in orders])),
        }

    def _reduce(self, index: int, output: Output) -> ReducedOutput:
        return output[:1].copy()
