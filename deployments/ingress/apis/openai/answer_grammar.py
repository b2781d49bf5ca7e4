"""The grammar of an answer, from `response_format` or from a field of another server."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from deployments.errors import InvalidField
from deployments.ingress.apis.openai.schemas import GenerationBody
from deployments.ingress.apis.shared.schema_grammar import (
    build_schema_grammar,
    parse_named_schema,
    read_schema,
)
from deployments.messages import Grammar
from deployments.tasks.inputs import Inputs, Many, NonEmptyText

FORMAT_FIELD = "response_format"
CHOICES: Inputs[list[str]] = Inputs(Many[NonEmptyText], "a list of texts, none of them empty")
FORMAT_TYPES = ("text", "json_object", "json_schema", "json", "regex")
# Keys beside `type` that may have the schema. The first one counts.
_SCHEMA_KEYS = {
    "json_schema": ("json_schema", "schema", "value"),
    "json_object": ("schema", "value"),
    "json": ("value", "schema"),
}


def parse_grammar(body: GenerationBody) -> Grammar | None:
    """Parse the field of `body` that constrains the answer; None for free text.

    Raises InvalidField, also for two fields with a grammar.
    """
    found = _find_grammars(body)
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidField(f"`{first}` and `{second}` exclude each other; send one", field=first)
    return next(iter(found.values()), None)


def find_grammar_field(body: GenerationBody) -> str:
    """Return the field with the grammar of a parsed body, which errors name."""
    return next(iter(_find_grammars(body)), FORMAT_FIELD)


def _find_grammars(body: GenerationBody) -> dict[str, Grammar]:
    """Return the grammars of `body` by field. A field may also ask for free text."""
    found: dict[str, Grammar] = {}
    for field, parse in _PARSERS.items():
        value = getattr(body, field, None)
        if value is not None and (grammar := parse(value, field)) is not None:
            found[field] = grammar
    return found


def _parse_format(value: Any, field: str) -> Grammar | None:
    """Parse `response_format`.

    The forms are `{"type": "text"}`, `{"type": "json_object"}`, `{"type": "json_schema",
    "json_schema": {"schema": S}}`, and `{"type": "regex", "value": ...}`. For the types of JSON,
    llama.cpp has S as `schema`, and TGI as `value`, for `json_schema` also as `{"schema": S}`.
    """
    if not isinstance(value, dict):
        raise InvalidField(f"`{field}` must be an object", field=field)
    format_type = value.get("type")
    if format_type not in FORMAT_TYPES:
        known = ", ".join(f"`{name}`" for name in FORMAT_TYPES)
        raise InvalidField(f"`{field}.type` must be one of {known}", field=f"{field}.type")
    if format_type == "text":
        return None
    if format_type == "regex":
        return _parse_expression(value.get("value"), f"{field}.value")
    keys = _SCHEMA_KEYS[format_type]
    key = next((key for key in keys if value.get(key) is not None), None)
    if key is None and format_type == "json_object":
        return Grammar("json_object")
    key = key or keys[0]
    schema, path = value.get(key), f"{field}.{key}"
    if key == "json_schema":
        if not isinstance(schema, dict):
            raise InvalidField(f"`{path}` must be an object with the key `schema`", field=path)
        return _parse_schema(schema.get("schema"), f"{path}.schema")
    if key == "value" and format_type == "json_schema":
        return parse_named_schema(schema, path)
    return _parse_schema(schema, path)


def _parse_schema(value: Any, path: str) -> Grammar:
    return build_schema_grammar(read_schema(value, path))


def _parse_expression(value: Any, path: str) -> Grammar:
    if not isinstance(value, str) or not value:
        raise InvalidField(f"`{path}` must be a regular expression", field=path)
    return Grammar("regex", value)


def _parse_choices(value: Any, path: str) -> Grammar:
    """Parse a list of texts, of which the answer is one, into a regular expression."""
    return Grammar("regex", "|".join(map(re.escape, CHOICES.read(value, path))))


def _parse_outputs(value: Any, field: str) -> Grammar | None:
    """Parse vLLM's `structured_outputs`, which has a key of _OUTPUT_PARSERS, or options of them."""
    if not isinstance(value, dict):
        raise InvalidField(f"`{field}` must be an object", field=field)
    given = [key for key, each in value.items() if each is not None and each is not False]
    if given == ["json_object"]:
        return Grammar("json_object")
    if other := next((key for key in given if key not in _OUTPUT_PARSERS), None):
        path = f"{field}.{other}"
        instead = f"send {_OUTPUT_KEYS}" if other in OTHER_GRAMMARS else "omit it"
        raise InvalidField(f"`{path}` is not supported; {instead}", field=path)
    if len(given) > 1:
        raise InvalidField(f"`{field}` must have one key: {_OUTPUT_KEYS}", field=field)
    return _OUTPUT_PARSERS[given[0]](value[given[0]], f"{field}.{given[0]}") if given else None


OTHER_GRAMMARS = ("grammar", "structural_tag")
_OUTPUT_PARSERS = {"json": _parse_schema, "regex": _parse_expression, "choice": _parse_choices}
_OUTPUT_KEYS = "`json`, `regex` or `choice`"
# Fields with a grammar. `response_format` is OpenAI's, `json_schema` that of llama.cpp and SGLang,
# `regex` SGLang's. The others are vLLM's.
_PARSERS: Mapping[str, Callable[[Any, str], Grammar | None]] = {
    FORMAT_FIELD: _parse_format,
    "json_schema": _parse_schema,
    "guided_json": _parse_schema,
    "regex": _parse_expression,
    "guided_regex": _parse_expression,
    "guided_choice": _parse_choices,
    "structured_outputs": _parse_outputs,
}
