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
    corrupt_file,
    read_field,
    read_json,
    read_object,
)
from build_artifacts.checkpoints.checks import check_weights
from build_artifacts.errors import SourceNotFound, UnsupportedModel
from deployments.artifacts.types import TaskName

ADAPTER_STEM = "adapter_model"
# Labels of a classifier in id order, as a JSON list of strings. peft itself does not store them.
LABELS_NAME = "labels.json"

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
        raise SourceNotFound(
            f"no `{ADAPTER_CONFIG_NAME}` in {directory}", hint="pass a directory saved by peft"
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
    _check_numbers(directory / ADAPTER_CONFIG_NAME, config)
    base = read_field(directory / ADAPTER_CONFIG_NAME, "base_model_name_or_path", str)
    return Adapter(
        directory.resolve(), content_digest(directory), task, _read_labels(directory), base
    )


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
                raise corrupt_file(path, f"`{pattern}` in `{name}` is no pattern: {exc}") from exc
    for name, number in numbers.items():
        if not isinstance(number, int | float | None):
            raise corrupt_file(path, f"`{name}` is not a number")


def _read_labels(directory: Path) -> tuple[str, ...]:
    labels = read_json(directory / LABELS_NAME, default=[])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise UnsupportedModel(
            f"`{LABELS_NAME}` is not a list of strings",
            hint='write the labels in id order, such as ["NEGATIVE", "POSITIVE"]',
        )
    return tuple(labels)
