"""LoRA adapters: validation, task and labels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.checkpoints.architectures import parse_task_class
from build_artifacts.checkpoints.checkpoint import (
    ADAPTER_CONFIG_NAME,
    Json,
    content_digest,
    corrupt_file_error,
    is_plain_file,
    read_field,
    read_json,
    read_object,
)
from build_artifacts.checkpoints.checks import check_weights, suggest_download
from build_artifacts.checkpoints.file_formats import SAFETENSORS_SUFFIX
from build_artifacts.errors import SourceNotFound, UnsupportedModel
from deployments.artifacts.types import TaskName
from deployments.builds.sources import is_hub_id

ADAPTER_STEM = "adapter_model"
# File of the user, for what peft does not store: the labels in id order, as `["A", "B"]` or
# `{"labels": [...], "problem_type": "..."}`.
LABELS_NAME = "labels.json"
_EXAMPLE_LABELS = '["NEGATIVE", "POSITIVE"]'
LABELS_HINT = f"write the labels in id order to `{LABELS_NAME}` of the adapter: {_EXAMPLE_LABELS}"
# Names of transformers for what a text classifier answers: one label, several, or numbers.
PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")

_TASKS = {
    "SEQ_CLS": TaskName.TEXT_CLASSIFICATION,
    "TOKEN_CLS": TaskName.TOKEN_CLASSIFICATION,
    "QUESTION_ANS": TaskName.QUESTION_ANSWERING,
    "FEATURE_EXTRACTION": TaskName.FEATURE_EXTRACTION,
    "CAUSAL_LM": TaskName.TEXT_GENERATION,
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """Validated LoRA adapter. `revision` is the digest of its files."""

    directory: Path
    revision: str
    task: TaskName
    labels: tuple[str, ...]  # in id order; empty without labels.json
    base: str | None = None  # model with which it was trained: a hub id or a path
    problem_type: str | None = None  # one of PROBLEM_TYPES; None: that of the base model

    @property
    def name(self) -> str:
        return self.directory.name


def read_adapter(directory: Path) -> Adapter:
    """Read the adapter in `directory`.

    Raises SourceNotFound without adapter_config.json, and the errors of `check_weights`. Raises
    UnsupportedModel for an adapter type other than LoRA, an unknown task, repeated layers, and
    invalid ranks, factors or labels.
    """
    config = read_object(directory / ADAPTER_CONFIG_NAME)
    if not config:
        is_remote = not directory.exists() and is_hub_id(str(directory))
        raise SourceNotFound(
            f"no `{ADAPTER_CONFIG_NAME}` in `{directory}`",
            hint=f"pass {suggest_download(str(directory))}"
            if is_remote
            else "pass a directory saved by peft",
        )
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(
            f"the adapter has the type `{kind}`", hint="only LoRA adapters can be merged"
        )
    task = _read_task(directory, config)
    if task is None:
        raise UnsupportedModel(
            f"the adapter was trained for `{config.get('task_type')}`",
            hint=f"supported `task_type`: {', '.join(_TASKS)}",
        )
    if config.get("layer_replication"):
        raise UnsupportedModel(
            "the adapter repeats layers of its base model (`layer_replication`)",
            hint="only adapters for the layers of the base model can be merged",
        )
    check_weights(directory, ADAPTER_STEM)
    if not is_plain_file(directory / f"{ADAPTER_STEM}{SAFETENSORS_SUFFIX}"):
        raise UnsupportedModel(
            "the weights of the adapter are in several files, which peft does not read",
            hint="save it again with peft, which writes one file",
        )
    _check_numbers(directory / ADAPTER_CONFIG_NAME, config)
    base = read_field(directory / ADAPTER_CONFIG_NAME, "base_model_name_or_path", str)
    labels, problem_type = _read_labels(directory, task)
    return Adapter(directory.resolve(), content_digest(directory), task, labels, base, problem_type)


def _read_task(directory: Path, config: Mapping[str, Json]) -> TaskName | None:
    """Return the task, from `task_type` or the class of the base model; None if unsupported."""
    if config.get("task_type") is not None:
        return _TASKS.get(str(config["task_type"]))
    mapping = read_field(directory / ADAPTER_CONFIG_NAME, "auto_mapping", dict) or {}
    return parse_task_class(str(mapping.get("base_model_class")))


def _check_numbers(path: Path, config: Mapping[str, Json]) -> None:
    """Reject ranks and factors that are no numbers, whose errors in peft do not name the field."""
    numbers = {name: config.get(name) for name in ("r", "lora_alpha")}
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern, number in (read_field(path, name, dict) or {}).items():
            numbers[f"{name}.{pattern}"] = number
            try:
                re.compile(pattern)
            except re.error as exc:
                raise corrupt_file_error(
                    path, f"`{pattern}` in `{name}` is no pattern: {exc}"
                ) from exc
    for name, number in numbers.items():
        if not isinstance(number, int | float | None):
            raise corrupt_file_error(path, f"`{name}` is not a number")


def _read_labels(directory: Path, task: TaskName) -> tuple[tuple[str, ...], str | None]:
    """Return the labels and the problem type of labels.json, () and None without the file."""
    content = read_json(directory / LABELS_NAME, default=[])
    stated = content if isinstance(content, dict) else {"labels": content}
    labels, problem_type = stated.get("labels"), stated.get("problem_type")
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise UnsupportedModel(f"`{LABELS_NAME}` is not a list of strings", hint=LABELS_HINT)
    if unknown := sorted(stated.keys() - {"labels", "problem_type"}):
        raise UnsupportedModel(
            f"`{LABELS_NAME}` has the unknown field `{unknown[0]}`",
            hint="its fields are `labels` and `problem_type`",
        )
    if problem_type not in (None, *PROBLEM_TYPES):
        raise UnsupportedModel(
            f"`problem_type` in `{LABELS_NAME}` is `{problem_type}`",
            hint=f"use one of: {', '.join(PROBLEM_TYPES)}",
        )
    if problem_type is not None and task is not TaskName.TEXT_CLASSIFICATION:
        raise UnsupportedModel(
            f"`{LABELS_NAME}` states a `problem_type`, and the adapter was trained for {task}",
            hint=f"only adapters for {TaskName.TEXT_CLASSIFICATION} have one; remove it",
        )
    return tuple(labels), problem_type
