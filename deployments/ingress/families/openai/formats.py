"""What `response_format` may be: OpenAI's forms, huggingface_hub's and TGI's."""

from __future__ import annotations

from typing import Any

import orjson

from deployments.errors import InvalidField
from deployments.generation.messages import Grammar

FIELD = "response_format"
KINDS = ("text", "json_object", "json_schema", "json", "regex")


def grammar_of(form: Any) -> Grammar | None:
    """What the text must follow; None where it is free. Raises InvalidField.

    `{"type": "text"}`, `{"type": "json_object"}`, the latter also with a schema as `value`,
    `{"type": "json_schema", "json_schema": {"schema": ...}}`, `{"type": "json", "value": ...}` and
    `{"type": "regex", "value": ...}`.
    """
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InvalidField(f"`{FIELD}` must be an object", field=FIELD)
    kind = form.get("type")
    if kind not in KINDS:
        known = ", ".join(f"`{one}`" for one in KINDS)
        raise InvalidField(f"`{FIELD}.type` must be one of {known}", field=f"{FIELD}.type")
    if kind == "text":
        return None
    if kind == "regex":
        return Grammar("regex", _expression(form))
    if kind == "json_schema":
        return schema_grammar(*_named_schema(form))
    value = form.get("value")
    if value is None and kind == "json_object":
        return Grammar("json_object")
    return schema_grammar(value, f"{FIELD}.value")


def schema_grammar(schema: Any, path: str) -> Grammar:
    """The grammar of a JSON schema. Raises InvalidField naming `path`."""
    if not isinstance(schema, dict):
        raise InvalidField(f"`{path}` must be a JSON schema, which is an object", field=path)
    return Grammar("json_schema", orjson.dumps(schema).decode())


def _expression(form: dict[str, Any]) -> str:
    value = form.get("value")
    if not isinstance(value, str) or not value:
        path = f"{FIELD}.value"
        raise InvalidField(f"`{path}` must be a regular expression", field=path)
    return value


def _named_schema(form: dict[str, Any]) -> tuple[Any, str]:
    """The schema and its path; TGI puts what OpenAI calls `json_schema` in `value`."""
    key = "json_schema" if form.get("json_schema") is not None else "value"
    named = form.get(key)
    if not isinstance(named, dict) or (key == "value" and "schema" not in named):
        return named, f"{FIELD}.{key}"
    return named.get("schema"), f"{FIELD}.{key}.schema"
