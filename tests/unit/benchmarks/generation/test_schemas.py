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


def random_request(seed: int = 7) -> tuple[SchemaTask, ...]:
    return build_schema_tasks(random.Random(seed))


def within(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all its sub-schemas."""
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict | list):
            yield from within(part)


@pytest.mark.parametrize("seed", SEEDS)
def test_build_schema_tasks_returns_fifty_distinct_schemas(seed: int) -> None:
    forms = random_request(seed)
    assert len(forms) == 50
    assert len(KINDS) == 10
    for texts in (
        {form.name for form in forms},
        {form.prompt for form in forms},
        {orjson.dumps(form.schema, option=orjson.OPT_SORT_KEYS) for form in forms},
    ):
        assert len(texts) == 50
    assert all(re.fullmatch("[a-z]+_[1-5]", form.name) for form in forms)


def test_build_schema_tasks_is_a_function_of_the_seed() -> None:
    assert random_request() == random_request()
    assert random_request() != random_request(8)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_schema_is_valid_and_bounded(seed: int) -> None:
    for form in random_request(seed):
        jsonschema.Draft202012Validator.check_schema(form.schema)
        assert not jsonschema.Draft202012Validator(form.schema).is_valid({}), form.name
        for part in within(form.schema):
            match part.get("type"):
                case "object":
                    assert part["additionalProperties"] is False, form.name
                    assert part["required"] == list(part["properties"])
                case "array":
                    assert 1 <= part["minItems"] <= part["maxItems"] <= 4, form.name
                case "string":
                    assert part.keys() & {"enum", "pattern", "maxLength"}, form.name
                case "integer":
                    assert part.keys() >= {"minimum", "maximum"} or "enum" in part, form.name
                case kind:
                    assert kind in (None, "boolean", "null"), form.name
