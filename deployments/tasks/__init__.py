"""Tasks: one file per family; TASKS is the one table."""

from __future__ import annotations

from collections.abc import Mapping

from deployments.manifest import TaskName
from deployments.tasks.base import Task, TaskInput
from deployments.tasks.embedding import FeatureExtraction, SentenceSimilarity
from deployments.tasks.text_classification import TextClassification

__all__ = ["TASKS", "Task", "TaskInput"]

TASKS: Mapping[TaskName, Task] = {
    task.name: task for task in (FeatureExtraction(), SentenceSimilarity(), TextClassification())
}
