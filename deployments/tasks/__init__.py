"""Tasks: one file per family; TASKS is the one table."""

from __future__ import annotations

from collections.abc import Mapping

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import TaskName
from deployments.tasks.base import DecodeContext, Task, TaskInput
from deployments.tasks.embedding import FeatureExtraction, SentenceSimilarity
from deployments.tasks.fill_mask import FillMask
from deployments.tasks.question_answering import QuestionAnswering
from deployments.tasks.ranking import TextRanking
from deployments.tasks.text_classification import TextClassification
from deployments.tasks.token_classification import TokenClassification
from deployments.tasks.token_embeddings import TokenEmbeddings
from deployments.tasks.zero_shot import ZeroShotClassification

__all__ = ["TASKS", "DecodeContext", "Task", "TaskInput", "find_tasks"]

TASKS: Mapping[TaskName, Task] = {
    task.name: task
    for task in (
        FeatureExtraction(),
        SentenceSimilarity(),
        TextClassification(),
        ZeroShotClassification(),
        TextRanking(),
        TokenClassification(),
        FillMask(),
        QuestionAnswering(),
        TokenEmbeddings(),
    )
}


def find_tasks(manifest: ArtifactManifest) -> tuple[TaskName, ...]:
    """What a model can be params: its own tasks first, then the others it fits.

    A model that generates text has only its own; those are no rows of TASKS.
    """
    if manifest.generation_config is not None:
        return manifest.tasks
    fitting = [name for name, task in TASKS.items() if task.fits(manifest)]
    own = [name for name in manifest.tasks if name in fitting]
    return (*own, *(name for name in fitting if name not in own))
