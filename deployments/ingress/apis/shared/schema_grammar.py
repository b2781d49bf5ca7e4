"""Grammars of JSON schemas in requests."""

from __future__ import annotations

from typing import Any

import orjson

from deployments.errors import InvalidField, MalformedBody
from deployments.ingress.http.bodies import parse_json
from deployments.messages import Grammar
from deployments.tasks.inputs import JsonSchema


def read_schema(value: Any, path: str) -> JsonSchema:
    """Return a JSON schema, which a body has as an object or as the text of one.

    Raises InvalidField with `path`.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value.encode())
        except MalformedBody:
            value = None
    if not isinstance(value, dict):
        raise InvalidField(f"`{path}` must be a JSON schema, which is an object", field=path)
    return value


def build_schema_grammar(schema: JsonSchema) -> Grammar:
    return Grammar("json_schema", orjson.dumps(schema).decode())


def parse_named_schema(value: Any, path: str) -> Grammar:
    """Parse the `value` of TGI's type `json_schema`: a schema, or an object with it as `schema`."""
    schema = read_schema(value, path)
    inner = schema.get("schema")
    return build_schema_grammar(inner if isinstance(inner, dict) else schema)
