"""Tests of the tasks that read texts with a prompt and have no options."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.artifacts.types import TaskName
from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.messages import Truncation
from deployments.tasks.base import Task
from deployments.tasks.sparse_embeddings import SparseEmbeddings
from deployments.tasks.token_embeddings import TokenEmbeddings
from tests.support.artifacts import tiny_manifest, with_tasks

PROMPTS = {"query": "the query: "}
EACH_TASK = pytest.mark.parametrize("task", [SparseEmbeddings(), TokenEmbeddings()])


def parse(task: Task, inputs: Any, parameters: dict[str, Any]) -> Any:
    manifest = with_tasks(tiny_manifest(), TaskName(task.name))
    return task.parse(inputs, parameters, manifest.model_copy(update={"prompts": PROMPTS}))


@EACH_TASK
def test_parse_reads_texts_and_prompt(task: Task) -> None:
    single = parse(task, "a", {"prompt_name": "query", "truncate": False})
    assert (single.texts, single.fields) == (("the query: a",), ("inputs",))
    assert single.truncation is Truncation.REFUSE
    several = parse(task, ["a", "b"], {})
    assert (several.texts, several.fields) == (("a", "b"), ("inputs[0]", "inputs[1]"))
    assert several.truncation is Truncation.KEEP_START


@EACH_TASK
@pytest.mark.parametrize(
    ("inputs", "parameters", "error", "field"),
    [
        ("", {}, EmptyInput, "inputs"),
        (["a", ""], {}, EmptyInput, "inputs[1]"),
        ({"text": "a"}, {}, InvalidField, "inputs"),
        ("a", {"prompt_name": "poem"}, InvalidField, "parameters.prompt_name"),
        ("a", {"normalize": True}, UnknownParameter, "parameters.normalize"),
        ("a", {"dimensions": 3}, UnknownParameter, "parameters.dimensions"),
    ],
)
def test_invalid_request_is_rejected_with_its_path(
    task: Task, inputs: Any, parameters: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as caught:
        parse(task, inputs, parameters)
    assert caught.value.field == field
