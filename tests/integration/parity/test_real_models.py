"""Answers of trained demo models equal transformers, or torch, on the same fp32 weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.demo import find_demo_model
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.steps.dequantize_onnx import dequantize_onnx
from build_artifacts.steps.merge import merge
from build_artifacts.steps.resolve import resolve
from deployments.artifacts.types import TaskName
from tests.integration.parity import test_ranking, test_token_classification, test_zero_shot
from tests.support.parity_models import ParityModel
from tests.support.served_models import MINILM_NLI, MINILM_RERANK, RAMPART

DESCRIPTIONS = (
    "Two boys in red shirts are kicking a ball on a wet field.",
    "An old man is reading a newspaper in a cafe.",
)
CLAIMS = ("Children are playing a sport.", "Somebody is swimming.", "A person reads.")
SEARCHES = [
    {"query": query, "texts": [*DESCRIPTIONS, "The river crosses the city from south to north."]}
    for query in ("Where is the river?", "Who reads a newspaper?")
]
LETTERS = (
    "My name is Maria Castillo and I live at 42 Cedar Road, Denver, Colorado 80202.",
    "Ask Farid Walker or Elena Kim in Boise before Monday.",
)


def load(model_id: str, task: TaskName, root: Path) -> ParityModel:
    """Write a demo model's checkpoint as a build prepares it: dequantized, adapter merged."""
    model = find_demo_model(model_id)
    (root / "scratch").mkdir()
    (root / "checkpoint").mkdir()
    checkpoint = resolve(model.ref, root / "scratch", HuggingFaceHub())
    if checkpoint.packed is not None:
        dequantize_onnx(checkpoint, root / "checkpoint")
    if model.adapter is not None:
        merge(checkpoint, read_adapter(model.adapter), root / "checkpoint")
    return ParityModel(root, task)


@pytest.mark.slow
async def test_entities_of_rampart_equal_the_pipeline(tmp_path: Path) -> None:
    model = load(RAMPART, TaskName.TOKEN_CLASSIFICATION, tmp_path)
    expected = model.pipeline()(list(LETTERS), aggregation_strategy="simple")
    async with model.serving() as served:
        found = await served.alone(LETTERS, {"aggregation_strategy": "simple"})
    test_token_classification.assert_same(found, expected)


@pytest.mark.slow
async def test_zero_shot_labels_of_minilm_equal_the_pipeline(tmp_path: Path) -> None:
    model = load(MINILM_NLI, TaskName.ZERO_SHOT_CLASSIFICATION, tmp_path)
    parameters = test_zero_shot.build_parameters(CLAIMS, True, "{}")
    expected = model.pipeline()(list(DESCRIPTIONS), **parameters)
    async with model.serving() as served:
        test_zero_shot.assert_same(await served.alone(DESCRIPTIONS, parameters), expected)


@pytest.mark.slow
async def test_scores_of_the_reranker_equal_torch(tmp_path: Path) -> None:
    model = load(MINILM_RERANK, TaskName.TEXT_RANKING, tmp_path)
    logits = test_ranking.compute_logits(model, SEARCHES)
    async with model.serving() as served:
        answers = await served.alone(SEARCHES)
    expected = pytest.approx(test_ranking.sigmoid(logits), abs=test_ranking.SCORE_TOLERANCE)
    assert test_ranking.collect_scores(answers) == expected
    assert logits.argmax(axis=1).tolist() == [2, 1]
