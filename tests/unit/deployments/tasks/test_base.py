from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from deployments.artifacts.types import GENERATIVE_TASKS, TASK_HEADS, TaskName
from deployments.errors import InvalidField, ServeError, UnknownParameter
from deployments.messages import Truncation
from deployments.tasks import TASKS, find_tasks
from deployments.tasks.base import TextParameters, build_item_paths
from deployments.tasks.inputs import parse_parameters
from tests.support.artifacts import tiny_manifest


def test_every_task_name_has_its_task() -> None:
    generating = set(GENERATIVE_TASKS)  # these have loops and families of their own
    assert {name: task.name for name, task in TASKS.items()} == {
        name: name for name in TaskName if name not in generating
    }


@pytest.mark.parametrize("name", TASKS)
def test_a_task_fits_models_of_its_own_head_only(name: TaskName) -> None:
    # Zero-shot classification is for those classifiers that judge entailment, ranking for those
    # that give one score.
    labels = {
        TaskName.ZERO_SHOT_CLASSIFICATION: ("entailment", "neutral", "contradiction"),
        TaskName.TEXT_RANKING: ("relevance",),
    }.get(name, ("a", "b"))
    models = {
        own: tiny_manifest(labels=labels).model_copy(update={"tasks": (own,)}) for own in TASKS
    }
    assert TASKS[name].fits(models[name])
    fitted = {TASK_HEADS[own] for own, manifest in models.items() if TASKS[name].fits(manifest)}
    # A model of embeddings ranks too, by cosine.
    assert fitted - {TASK_HEADS[TaskName.FEATURE_EXTRACTION]} <= {TASK_HEADS[name]}


def test_a_model_serves_its_own_tasks_first() -> None:
    embedder = tiny_manifest()
    own = (TaskName.SENTENCE_SIMILARITY, TaskName.FEATURE_EXTRACTION)
    served = find_tasks(embedder.model_copy(update={"tasks": own}))
    assert tuple(served[:2]) == own
    assert len(served) == len(set(served))


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_every_task_describes_itself_for_the_documentation(task: Any) -> None:
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
def test_the_direction_names_the_side_that_is_cut_off(
    raw: dict[str, Any], truncation: Truncation
) -> None:
    assert parse_parameters(TextParameters, raw).truncation is truncation


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
def test_a_parameter_that_cannot_be_meant_is_named(
    raw: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        parse_parameters(TextParameters, raw)
    assert refusal.value.field == field
    assert f"`{field}`" in refusal.value.message


def test_items_of_a_list_are_counted_from_zero() -> None:
    assert build_item_paths("inputs", 1, single=True) == ("inputs",)
    assert build_item_paths("inputs", 1, single=False) == ("inputs[0]",)
    assert build_item_paths("inputs.sentences", 2, single=False) == (
        "inputs.sentences[0]",
        "inputs.sentences[1]",
    )
