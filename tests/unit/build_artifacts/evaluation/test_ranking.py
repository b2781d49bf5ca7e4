from __future__ import annotations

import math

import numpy as np
import pytest

from build_artifacts.errors import UnsupportedModel
from build_artifacts.evaluation import BadEvaluationData, ExampleSampling, load_evaluation
from deployments.artifacts.types import TaskName
from tests.unit.build_artifacts.evaluation.conftest import MakeModel, WriteFile, json_lines

TASK = TaskName.TEXT_RANKING
TWO = json_lines(
    {"query": "good food", "documents": ["a city", "food", "the"], "relevant": [1]},
    {"query": "train", "documents": ["a", "train", "night train", "of"], "relevant": [2, 1, 2]},
)


def scores(*values: float) -> list[np.ndarray]:
    return [np.array([value], dtype=np.float32) for value in values]


def test_ranking_metrics_match_hand_calculation(write: WriteFile, make_model: MakeModel) -> None:
    evaluation = load_evaluation(write("a.jsonl", TWO), TASK, make_model(labels=("score",)))
    assert evaluation.metric == "mrr"
    assert evaluation.score(scores(0, 5, -1, 0, 1, 2, -1)) == {"mrr": 1, "ndcg@10": 1}
    # Relevant documents are at place 2 of the first query, and at places 2 and 4 of the second.
    got = evaluation.score(scores(9, 5, -1, 7, 1, 5, 2))
    second = (1 / math.log2(3) + 1 / math.log2(5)) / (1 + 1 / math.log2(3))
    assert got == {
        "mrr": pytest.approx((1 / 2 + 1 / 2) / 2),
        "ndcg@10": pytest.approx((1 / math.log2(3) + second) / 2),
    }


def test_constant_model_ranks_relevant_documents_last(
    write: WriteFile, make_model: MakeModel
) -> None:
    line = {"query": "q", "documents": ["a", "b", "c", "d"], "relevant": [0]}
    evaluation = load_evaluation(write("a.jsonl", json_lines(line)), TASK, make_model())
    assert evaluation.score(scores(1, 1, 1, 1))["mrr"] == 0.25


def test_ranking_items_are_query_document_pairs(write: WriteFile, make_model: MakeModel) -> None:
    evaluation = load_evaluation(write("a.jsonl", TWO), TASK, make_model())
    assert [(len(i.ids), i.second_segment_start) for i in evaluation.items] == [
        (7, 4), (6, 4), (6, 4), (5, 3), (5, 3), (6, 3), (5, 3),
    ]  # fmt: skip


def test_sample_consists_of_queries(write: WriteFile, make_model: MakeModel) -> None:
    path = write("a.jsonl", TWO)
    evaluation = load_evaluation(path, TASK, make_model(), ExampleSampling(limit=1, seed=0))
    assert len(evaluation.items) in (3, 4)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"documents": ["a"], "relevant": [0]}, "line 1, `query`: missing"),
        ({"query": "q", "documents": [], "relevant": [0]}, "`documents`: an empty list"),
        ({"query": "q", "documents": "a", "relevant": [0]}, "`documents`: not a list"),
        ({"query": "q", "documents": ["a", 3], "relevant": [0]}, r"`documents\[1\]`: not a string"),
        ({"query": "q", "documents": ["a", ""], "relevant": [0]}, r"`documents\[1\]`: empty"),
        ({"query": "q", "documents": ["a"], "relevant": []}, "`relevant`: an empty list"),
        ({"query": "q", "documents": ["a"], "relevant": [1]}, "`1` is not an index into 1 docu"),
        ({"query": "q", "documents": ["a"], "relevant": [-1]}, "`-1` is not an index"),
        ({"query": "q", "documents": ["a"], "relevant": [False]}, "`False` is not an index"),
        ({"query": "q", "documents": ["a"], "relevant": ["a"]}, "`a` is not an index"),
    ],
)
def test_invalid_query_is_rejected(
    write: WriteFile, make_model: MakeModel, line: dict[str, object], complaint: str
) -> None:
    with pytest.raises(BadEvaluationData, match=complaint):
        load_evaluation(write("a.jsonl", json_lines(line)), TASK, make_model())


def test_model_with_several_scores_is_rejected(write: WriteFile, make_model: MakeModel) -> None:
    with pytest.raises(UnsupportedModel, match="one label; this model has 2"):
        load_evaluation(write("a.jsonl", TWO), TASK, make_model(labels=("no", "yes")))
