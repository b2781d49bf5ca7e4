"""Tasks: one file per family; TASKS is the one table.

The build compiles more than is served so far. These tasks have graphs and a gate but no row here:
text-ranking, token-classification, question-answering and fill-mask. A request for one of them is
answered 400, `wrong_task`, and the model list says which tasks of a model are served.
"""

from __future__ import annotations

from collections.abc import Mapping

from deployments.manifest import ArtifactManifest, TaskName
from deployments.tasks.base import Task, TaskInput
from deployments.tasks.embedding import FeatureExtraction, SentenceSimilarity
from deployments.tasks.text_classification import TextClassification

__all__ = ["TASKS", "Task", "TaskInput", "served_tasks"]

TASKS: Mapping[TaskName, Task] = {
    task.name: task for task in (FeatureExtraction(), SentenceSimilarity(), TextClassification())
}


def served_tasks(manifest: ArtifactManifest) -> list[TaskName]:
    """Those of the model's tasks that have a row in TASKS."""
    return [task for task in manifest.tasks if task in TASKS]
