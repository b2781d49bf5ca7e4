"""The tasks of a checkpoint: those that its files state, and the related ones."""

from __future__ import annotations

from collections.abc import Sequence

from build_artifacts.checkpoints.adapter import Adapter
from build_artifacts.checkpoints.architectures import parse_task_class, read_model_class
from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    MODULES_NAME,
    Checkpoint,
    is_splade_model,
    read_field,
    read_modules,
)
from build_artifacts.checkpoints.rerankers import (
    LOGIT_SCORE,
    check_score_modules,
    is_logit_reranker,
)
from build_artifacts.checkpoints.sentences import is_cross_encoder
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.types import TEXT2TEXT_TASKS, ModelHead, TaskName
from deployments.tasks import find_head, list_task_names
from deployments.tasks.zero_shot import has_entailment_label

EMBEDDING_TASKS = (TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY)
# Tasks of a model whose output is one score per text.
LABEL_TASKS = (TaskName.TEXT_CLASSIFICATION, TaskName.TEXT_RANKING)


def select_tasks(
    checkpoint: Checkpoint, adapter: Adapter | None, requested: str | None
) -> tuple[str, ...]:
    """Return the tasks to build: `requested` or the task that the files state, then related tasks.

    Zero-shot classification is built as text classification, because the graphs are equal. The
    server offers both tasks for every classifier with an entailment label. Raises UnsupportedModel
    if the files state no task, or if the adapter or the labels do not fit `requested`.
    """
    task = requested or (adapter.task if adapter else None) or _detect_task(checkpoint)
    if task == TaskName.ZERO_SHOT_CLASSIFICATION:
        _check_entailment(_read_label_names(checkpoint, adapter))
        task = TaskName.TEXT_CLASSIFICATION
    head = find_head(task)
    if adapter is None:
        _check_head(checkpoint, task)
        if head is ModelHead.LABELS:
            check_score_modules(checkpoint, task)
    if adapter is not None and head is not find_head(adapter.task):
        raise UnsupportedModel(
            f"the adapter was trained for {adapter.task}, not for {task}", hint="omit `--task`"
        )
    if head is ModelHead.VECTOR:
        return EMBEDDING_TASKS if task in EMBEDDING_TASKS else (task, *EMBEDDING_TASKS)
    if task in TEXT2TEXT_TASKS:
        return (task, *(other for other in TEXT2TEXT_TASKS if other != task))
    if head is not ModelHead.LABELS:
        return (task,)
    if adapter is None and is_logit_reranker(checkpoint, task):
        return _select_label_tasks(task, 1)
    return _select_label_tasks(task, len(_read_label_names(checkpoint, adapter)))


def _check_head(checkpoint: Checkpoint, task: str) -> None:
    """Raise UnsupportedModel if the checkpoint has a head for another kind of labels.

    The weights of such heads have equal names, so transformers would load them.
    """
    architecture = read_model_class(checkpoint.weights)
    stated = parse_task_class(architecture)
    heads = {find_head(task), find_head(task if stated is None else stated)}
    if len(heads) > 1 and heads <= {ModelHead.LABELS, ModelHead.TOKENS, ModelHead.SPAN}:
        raise UnsupportedModel(
            f"`{architecture}` was trained for {stated}, not for {task}", hint="omit `--task`"
        )


def _select_label_tasks(task: str, labels: int) -> tuple[str, ...]:
    """Return `task` and, for a model with a single score, the other tasks of LABEL_TASKS.

    Raises UnsupportedModel for ranking with several labels.
    """
    if labels == 1:
        return (task, *(other for other in LABEL_TASKS if other != task))
    if task == TaskName.TEXT_RANKING:
        raise UnsupportedModel(
            f"ranking requires a model with 1 score; this model has {labels} labels",
            hint="omit `--task`",
        )
    return (task,)


def _check_entailment(labels: Sequence[str]) -> None:
    if not has_entailment_label(labels):
        shown = ", ".join(f"`{label}`" for label in labels[:3]) + (", …" if len(labels) > 3 else "")
        raise UnsupportedModel(
            f"zero-shot classification requires an entailment label; the labels are {shown}",
            hint="omit `--task`, or rename the label that means entailment in `id2label` of "
            "config.json",
        )


def _read_label_names(checkpoint: Checkpoint, adapter: Adapter | None) -> tuple[str, ...]:
    if adapter is not None and adapter.labels:
        return adapter.labels
    config = checkpoint.weights / CONFIG_NAME
    if named := read_field(config, "id2label", dict):
        return tuple(str(label) for label in named.values())
    count = read_field(config, "num_labels", int) or 2  # transformers' default
    return tuple(f"LABEL_{i}" for i in range(count))


def _detect_task(checkpoint: Checkpoint) -> TaskName:
    if LOGIT_SCORE in [module.class_name for module in read_modules(checkpoint.directory)]:
        return TaskName.TEXT_RANKING
    if is_cross_encoder(checkpoint):
        ranks = len(_read_label_names(checkpoint, None)) == 1
        return TaskName.TEXT_RANKING if ranks else TaskName.TEXT_CLASSIFICATION
    if (checkpoint.directory / MODULES_NAME).is_file():
        is_sparse = is_splade_model(checkpoint.directory)
        return TaskName.SPARSE_EMBEDDINGS if is_sparse else TaskName.FEATURE_EXTRACTION
    architecture = read_model_class(checkpoint.weights)
    if (task := parse_task_class(architecture)) is not None:
        return task
    raise UnsupportedModel(
        f"no task matches the architecture `{architecture or 'none'}`",
        hint=f"pass `--task`, one of: {', '.join(list_task_names())}",
    )
