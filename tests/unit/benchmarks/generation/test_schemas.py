from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import orjson
import pytest

from benchmarks.generation.schemas import KINDS, SchemaTask, build_schema_tasks

SEEDS = (0, 1, 20_261)


def build_tasks(seed: int = 7) -> tuple[SchemaTask, ...]:
    return build_schema_tasks(random.Random(seed))


def iterate_schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all its sub-schemas."""
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict | list):
            yield from iterate_schemas(part)


@pytest.mark.parametrize("seed", SEEDS)
def test_build_schema_tasks_returns_fifty_distinct_schemas(seed: int) -> None:
    tasks = build_tasks(seed)
    assert len(tasks) == 50
    assert len(KINDS) == 10
    for texts in (
        {task.name for task in tasks},
        {task.prompt for task in tasks},
        {orjson.dumps(task.schema, option=orjson.OPT_SORT_KEYS) for task in tasks},
    ):
        assert len(texts) == 50
    assert all(re.fullmatch("[a-z]+_[1-5]", task.name) for task in tasks)


def test_build_schema_tasks_is_a_function_of_the_seed() -> None:
    assert build_tasks() == build_tasks()
    assert build_tasks() != build_tasks(8)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_schema_is_valid_and_bounded(seed: int) -> None:
    for task in build_tasks(seed):
        jsonschema.Draft202012Validator.check_schema(task.schema)
        assert not jsonschema.Draft202012Validator(task.schema).is_valid({}), task.name
        for part in iterate_schemas(task.schema):
            match part.get("type"):
                case "object":
                    assert part["additionalProperties"] is False, task.name
                    assert part["required"] == list(part["properties"])
                case "array":
                    assert 1 <= part["minItems"] <= part["maxItems"] <= 4, task.name
                case "string":
                    assert part.keys() & {"enum", "pattern", "maxLength"}, task.name
                case "integer":
                    assert part.keys() >= {"minimum", "maximum"} or "enum" in part, task.name
                case kind:
                    assert kind in (None, "boolean", "null"), task.name
