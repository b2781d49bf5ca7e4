from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from deployments.artifacts.types import GENERATIVE_TASKS, TaskName
from deployments.errors import InvalidField, ServeError, UnknownParameter
from deployments.messages import Truncation
from deployments.tasks import TASKS, find_head, find_tasks
from deployments.tasks.base import TextParameters, build_item_paths
from deployments.tasks.inputs import parse_parameters
from tests.support.artifacts import tiny_manifest, with_tasks


def test_tasks_contain_every_task_name_without_generation() -> None:
    assert {name: task.name for name, task in TASKS.items()} == {name: name for name in TASKS}
    assert set(TaskName) - set(GENERATIVE_TASKS) <= TASKS.keys()


@pytest.mark.parametrize("name", TASKS)
def test_task_fits_only_models_with_its_head(name: TaskName) -> None:
    # Zero-shot classification needs an entailment label; ranking needs a single score.
    labels = {
        TaskName.ZERO_SHOT_CLASSIFICATION: ("entailment", "neutral", "contradiction"),
        TaskName.TEXT_RANKING: ("relevance",),
    }.get(name, ("a", "b"))
    models = {own: with_tasks(tiny_manifest(labels=labels), own) for own in TASKS}
    assert TASKS[name].fits(models[name])
    fitted = {find_head(own) for own, manifest in models.items() if TASKS[name].fits(manifest)}
    # Ranking also fits embedding models, by cosine similarity.
    by_cosine = {find_head(TaskName.FEATURE_EXTRACTION)} if name == TaskName.TEXT_RANKING else set()
    assert fitted == {find_head(name)} | by_cosine


def test_find_tasks_returns_tasks_of_the_manifest_first() -> None:
    embedder = tiny_manifest()
    own = (TaskName.SENTENCE_SIMILARITY, TaskName.FEATURE_EXTRACTION)
    served = find_tasks(with_tasks(embedder, *own))
    assert tuple(served[:2]) == own
    assert len(served) == len(set(served))


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_task_has_schemas_for_the_documentation(task: Any) -> None:
    assert task.inputs.schema()["description"]
    assert TypeAdapter(task.response_type).json_schema()
    properties = task.parameters.model_json_schema()["properties"]
    assert {"truncate", "truncation_direction"} <= set(properties)


@pytest.mark.parametrize(
    ("raw", "truncation"),
    [
        ({}, Truncation.REFUSE),
        ({"truncate": None}, Truncation.REFUSE),
        ({"truncate": False, "truncation_direction": "left"}, Truncation.REFUSE),
        ({"truncate": True}, Truncation.KEEP_START),
        ({"truncate": True, "truncation_direction": "right"}, Truncation.KEEP_START),
        ({"truncate": True, "truncation_direction": "Right"}, Truncation.KEEP_START),
        ({"truncate": True, "truncation_direction": "left"}, Truncation.KEEP_END),
        ({"truncate": True, "truncation_direction": "Left"}, Truncation.KEEP_END),
    ],
)
def test_truncation_direction_is_the_truncated_side(
    raw: dict[str, Any], truncation: Truncation
) -> None:
    parameters = parse_parameters(TextParameters, raw)
    assert parameters.choose_truncation(tiny_manifest()) is truncation


@pytest.mark.parametrize(
    ("raw", "truncation"),
    [
        ({"truncate": True}, Truncation.KEEP_END),
        ({"truncate": True, "truncation_direction": "right"}, Truncation.KEEP_START),
        ({}, Truncation.REFUSE),
    ],
)
def test_truncated_side_is_that_of_the_tokenizer_by_default(
    raw: dict[str, Any], truncation: Truncation
) -> None:
    manifest = tiny_manifest().model_copy(update={"truncation_side": "left"})
    assert parse_parameters(TextParameters, raw).choose_truncation(manifest) is truncation


@pytest.mark.parametrize(
    ("raw", "error", "field"),
    [
        ({"truncat": True}, UnknownParameter, "parameters.truncat"),
        ({"truncate": "yes"}, InvalidField, "parameters.truncate"),
        ({"truncate": 1}, InvalidField, "parameters.truncate"),
        ({"truncation_direction": "up"}, InvalidField, "parameters.truncation_direction"),
        ({"truncation_direction": 3}, InvalidField, "parameters.truncation_direction"),
    ],
)
def test_invalid_parameter_is_rejected_with_its_path(
    raw: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as caught:
        parse_parameters(TextParameters, raw)
    assert caught.value.field == field
    assert f"`{field}`" in caught.value.message


def test_item_paths_have_indices_from_zero() -> None:
    assert build_item_paths("inputs", 1, single=True) == ("inputs",)
    assert build_item_paths("inputs", 1, single=False) == ("inputs[0]",)
    assert build_item_paths("inputs.sentences", 2, single=False) == (
        "inputs.sentences[0]",
        "inputs.sentences[1]",
    )
