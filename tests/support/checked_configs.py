"""Configs with changed values, and checks of the problems that the linter finds in them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from cluster.linting.document import LintProblem
from cluster.linting.linter import check_text

CONFIG = Path(__file__).parents[2] / "serve_config.yaml"
APP = "applications.0"
INGRESS, TOKENIZER, CPU_ENCODER, GPU_ENCODER, CPU_GENERATOR, GPU_GENERATOR = (
    f"{APP}.deployments.{i}" for i in range(6)
)


def create_config(changes: dict[str, Any]) -> dict[str, Any]:
    """Return serve_config.yaml with `changes`, values by dotted path. Create missing mappings."""
    config = yaml.safe_load(CONFIG.read_text())
    for path, value in changes.items():
        *parents, last = (int(p) if p.isdigit() else p for p in path.split("."))
        owner = config
        for part in parents:
            owner = owner.setdefault(part, {}) if isinstance(owner, dict) else owner[part]
        owner[last] = copy.deepcopy(value)
    return config


def check_config(changes: dict[str, Any]) -> list[LintProblem]:
    return check_text(yaml.safe_dump(create_config(changes), sort_keys=False))


def to_dotted_path(path: str) -> str:
    return path.replace("[", ".").replace("]", "")


def assert_reported(changes: dict[str, Any], path: str, expected: str) -> None:
    """Check that the changes cause a problem at `path` whose message contains `expected`."""
    problems = check_config(changes)
    messages = [problem.message for problem in problems if to_dotted_path(problem.path) == path]
    assert any(expected in message for message in messages), problems
