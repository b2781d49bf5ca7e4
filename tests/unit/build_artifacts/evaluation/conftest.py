"""A model to fit examples to, and files of examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from build_artifacts.evaluation import EvaluatedModel
from tests.support.builders import tiny_tokenizer

MakeModel = Callable[..., EvaluatedModel]
WriteFile = Callable[[str, str], Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """A model of the tiny tokenizer that reads 64 tokens, unless told otherwise."""
    directory = tmp_path / "model"
    tiny_tokenizer(directory)

    def make(**facts: Any) -> EvaluatedModel:
        return EvaluatedModel(**{"directory": directory, "max_tokens": 64, **facts})

    return make


@pytest.fixture
def write(tmp_path: Path) -> WriteFile:
    """Write a file of examples by its name."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def json_lines(*values: object) -> str:
    return "".join(orjson.dumps(value).decode() + "\n" for value in values)
