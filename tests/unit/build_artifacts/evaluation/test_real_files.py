"""Evaluations with real data sets. A test is skipped if its file is not beside the checkout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from build_artifacts.evaluation import ExampleSampling, load_evaluation
from build_artifacts.evaluation.classification import load_classification
from build_artifacts.evaluation.loading import EVALUATIONS
from build_artifacts.evaluation.similarity import read_pairs
from build_artifacts.evaluation.squad import read_questions
from deployments.artifacts.types import GENERATIVE_TASKS, TaskName
from tests.unit.build_artifacts.evaluation.conftest import MakeModel

DATA = Path(__file__).resolve().parents[5] / "shared/data"


def present(name: str) -> Path:
    if not (DATA / name).is_file():
        pytest.skip(f"{name} is not at hand")
    return DATA / name


def test_every_buildable_task_has_an_evaluation() -> None:
    # Zero-shot classification is built and measured as text classification. Models for text
    # embeddings also return token embeddings.
    built_as_another = {TaskName.ZERO_SHOT_CLASSIFICATION, TaskName.TOKEN_EMBEDDINGS}
    # Generative tasks are measured by perplexity instead.
    assert set(EVALUATIONS) == set(TaskName) - built_as_another - set(GENERATIVE_TASKS)


def test_stsb(make_model: MakeModel) -> None:
    path = present("stsb-test.tsv")
    pairs = read_pairs(path)
    assert len(pairs) == 1379
    assert {pair.score for pair in pairs} <= set(np.arange(0, 5001) / 1000)
    evaluation = load_evaluation(
        path, TaskName.SENTENCE_SIMILARITY, make_model(), ExampleSampling(limit=100)
    )
    assert len(evaluation.items) == 200


def test_sst2(make_model: MakeModel) -> None:
    model = make_model(labels=("NEGATIVE", "POSITIVE"))
    evaluation = load_classification(present("sst2-dev.tsv"), model, ExampleSampling())
    positive = np.array([0, 1], dtype=np.float32)
    # 444 of the 872 sentences are positive.
    assert evaluation.score([positive] * 872)["accuracy"] == pytest.approx(444 / 872)


def test_squad(make_model: MakeModel) -> None:
    path = present("squad2-warsaw.json")
    questions = read_questions(path)
    assert (len(questions), sum(bool(question.golds) for question in questions)) == (486, 242)
    evaluation = load_evaluation(
        path, TaskName.QUESTION_ANSWERING, make_model(max_tokens=512), ExampleSampling(limit=40)
    )
    assert {len(item.ids) for item in evaluation.items} <= set(range(513))
    unanswered = [
        np.eye(1, len(item.ids), dtype=np.float32).T.repeat(2, axis=1) for item in evaluation.items
    ]
    chosen = ExampleSampling(limit=40).sample(questions)
    unanswerable = sum(not question.golds for question in chosen) / 40
    assert evaluation.score(unanswered)["f1"] == pytest.approx(unanswerable)
