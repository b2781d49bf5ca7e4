"""Tasks of encoder models. TASKS is the only table of these tasks."""

from __future__ import annotations

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import GENERATIVE_TASKS, ModelHead
from deployments.tasks.base import DecodeContext, Task, TaskInput
from deployments.tasks.embedding import FeatureExtraction, SentenceSimilarity
from deployments.tasks.fill_mask import FillMask
from deployments.tasks.question_answering import QuestionAnswering
from deployments.tasks.ranking import TextRanking
from deployments.tasks.sparse_embeddings import SparseEmbeddings
from deployments.tasks.text_classification import TextClassification
from deployments.tasks.token_classification import TokenClassification
from deployments.tasks.token_embeddings import TokenEmbeddings
from deployments.tasks.zero_shot import ZeroShotClassification

__all__ = [
    "TASKS",
    "DecodeContext",
    "Task",
    "TaskInput",
    "find_head",
    "find_tasks",
    "list_task_names",
]

TASKS: dict[str, Task] = {
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
        SparseEmbeddings(),
    )
}


def list_task_names() -> tuple[str, ...]:
    """Return the names of all tasks, those of generative models included."""
    return (*TASKS, *GENERATIVE_TASKS)


def find_head(task: str) -> ModelHead:
    """Return the head of the models that are made for `task`, one of `list_task_names`."""
    return ModelHead.NEXT_TOKEN if task in GENERATIVE_TASKS else TASKS[task].head


def find_tasks(manifest: ArtifactManifest) -> tuple[str, ...]:
    """Return the tasks that a model can do: first those of its manifest, then all others that fit.

    A generative model does only the tasks of its manifest. TASKS contains no generative tasks.
    """
    if manifest.generation_config is not None:
        return manifest.tasks
    fitting = [name for name, task in TASKS.items() if task.fits(manifest)]
    native = [name for name in manifest.tasks if name in fitting]
    return (*native, *(name for name in fitting if name not in native))
