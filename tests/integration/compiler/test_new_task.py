"""A new task needs one file and one table entry to be built; its evaluation needs the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from build_artifacts.errors import BuildError
from build_artifacts.evaluation.base import (
    EvaluatedModel,
    Evaluation,
    ExampleSampling,
    Output,
    ReducedOutput,
    tokenize_texts,
)
from build_artifacts.evaluation.loading import EVALUATIONS
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.presets import CPU_INT8_PLAIN
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import BuildRecipe
from deployments.tasks import TASKS
from tests.support.in_process import InProcess
from tests.support.toy_task import NAME, VectorLength

MODEL = "toys/length"


class LengthEvaluation(Evaluation):
    """Share of vectors whose norm exceeds the number in the line of their text."""

    def __init__(self, path: Path, model: EvaluatedModel) -> None:
        lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
        super().__init__(tokenize_texts(model, [text for text, _ in lines]), "longer")
        self._bounds = [float(bound) for _, bound in lines]

    def _reduce(self, index: int, output: Output) -> ReducedOutput:
        return np.linalg.norm(output, axis=-1)

    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        pairs = zip(reduced, self._bounds, strict=True)
        return {self.metric: float(np.mean([length > bound for length, bound in pairs]))}


def load_lengths(path: Path, model: EvaluatedModel, sampling: ExampleSampling) -> Evaluation:
    return LengthEvaluation(path, model)


@pytest.fixture
def request_length(
    tmp_path: Path, embedding_source: Path, monkeypatch: pytest.MonkeyPatch
) -> BuildRequest:
    monkeypatch.setitem(TASKS, NAME, VectorLength())
    data = tmp_path / "lengths.tsv"
    data.write_text("a film\t0.0\na train\t1e9\n", encoding="utf-8")
    return BuildRequest(
        ref=str(embedding_source),
        store=tmp_path / "store",
        id=MODEL,
        task=NAME,
        recipe=BuildRecipe(candidates=(CPU_INT8_PLAIN,)),
        budget=BuildBudget(tune_seconds=0, evaluation=data),
    )


async def test_task_registered_in_the_table_is_built_evaluated_and_served(
    request_length: BuildRequest, progress: BuildProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EVALUATIONS, NAME, load_lengths)
    manifest = build(request_length, progress).manifest
    assert manifest.tasks[0] == NAME
    assert manifest.scores["longer"] == 0.5
    async with InProcess(request_length.store, (MODEL,)).client() as client:
        response = await client.post(f"/models/{MODEL}", json={"inputs": ["a film"]})
    assert response.status_code == 200, response.text
    (length,) = response.json()
    assert length > 0


def test_task_without_an_evaluation_rejects_eval(
    request_length: BuildRequest, progress: BuildProgress
) -> None:
    with pytest.raises(BuildError, match=f"`--eval` does not support the task `{NAME}`"):
        build(request_length, progress)
