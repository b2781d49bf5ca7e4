"""Table of evaluations by task, and the digest of an example file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from build_artifacts.errors import BuildError
from build_artifacts.evaluation.base import EvaluatedModel, Evaluation, ExampleSampling
from build_artifacts.evaluation.classification import load_classification
from build_artifacts.evaluation.fill_mask import load_fill_mask
from build_artifacts.evaluation.question_answering import load_question_answering
from build_artifacts.evaluation.ranking import load_ranking
from build_artifacts.evaluation.similarity import load_similarity, load_sparse_similarity
from build_artifacts.evaluation.token_classification import load_token_classification
from deployments.artifacts.store import file_sha256
from deployments.artifacts.types import TaskName

LoadEvaluation = Callable[[Path, EvaluatedModel, ExampleSampling], Evaluation]

EVALUATIONS: dict[str, LoadEvaluation] = {
    TaskName.FEATURE_EXTRACTION: load_similarity,
    TaskName.SENTENCE_SIMILARITY: load_similarity,
    TaskName.TEXT_CLASSIFICATION: load_classification,
    TaskName.TEXT_RANKING: load_ranking,
    TaskName.TOKEN_CLASSIFICATION: load_token_classification,
    TaskName.QUESTION_ANSWERING: load_question_answering,
    TaskName.FILL_MASK: load_fill_mask,
    TaskName.SPARSE_EMBEDDINGS: load_sparse_similarity,
}
ALL_EXAMPLES = ExampleSampling()


def load_evaluation(
    path: Path, task: str, model: EvaluatedModel, sampling: ExampleSampling = ALL_EXAMPLES
) -> Evaluation:
    """Load the examples of a file as items for an engine.

    Raises BadEvaluationData for an unusable file. Raises BuildError for a task without an
    evaluation, and for a model whose outputs cannot be compared with labels.
    """
    load = EVALUATIONS.get(task)
    if load is None:
        raise BuildError(
            f"`--eval` does not support the task `{task}`",
            hint=f"omit `--eval`; tasks with an evaluation: {', '.join(EVALUATIONS)}",
        )
    return load(path, model, sampling)


def digest_data(path: Path, option: str = "--eval") -> str:
    """Return the sha256 of an example file in hex.

    Raises BuildError if it is unreadable; the error names the command-line `option` of the file.
    """
    try:
        return file_sha256(path)
    except OSError as exc:
        raise BuildError(
            f"`{path}` cannot be read: {exc.strerror}",
            hint=f"pass a file of labeled data to `{option}`",
        ) from exc
