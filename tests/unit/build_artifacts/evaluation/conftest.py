"""Fixtures: a model and files of labeled examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from build_artifacts.evaluation import EvaluatedModel
from tests.support.tiny_encoders import tiny_tokenizer

MakeModel = Callable[..., EvaluatedModel]
WriteFile = Callable[[str, str], Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Return a factory of models with the tiny tokenizer; `max_tokens` defaults to 64."""
    directory = tmp_path / "model"
    tiny_tokenizer(directory)

    def make(**options: Any) -> EvaluatedModel:
        return EvaluatedModel(**{"directory": directory, "max_tokens": 64, **options})

    return make


@pytest.fixture
def write(tmp_path: Path) -> WriteFile:
    """Return a function that writes a named file of examples."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def json_lines(*values: object) -> str:
    return "".join(orjson.dumps(value).decode() + "\n" for value in values)
