"""The grammar of a call to one of several tools, and of an answer that may be one instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.ingress.apis.openai.schemas import Tool
from deployments.ingress.apis.shared.schema_grammar import build_schema_grammar
from deployments.messages import Grammar

# Keywords, except `required`, that allow or describe members which `properties` does not list.
_MEMBER_KEYWORDS = frozenset(
    {
        "additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties",
        "$ref", "allOf", "anyOf", "oneOf", "const", "enum",
    }
)  # fmt: skip


def call_grammar(tools: Sequence[Tool]) -> Grammar:
    """Build the grammar of a call to one of the tools."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for i, tool in enumerate(tools):
        root = f"#/$defs/{i}"
        calls.append(_build_call_schema([tool], {"$ref": root}))
        definitions[str(i)] = _build_arguments_schema(tool, root)
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return build_schema_grammar({**schema, "$defs": definitions})


def call_or_answer_grammar(tools: Sequence[Tool], answer: Mapping[str, Any]) -> Grammar:
    """Build the grammar of an answer with the schema `answer`, or of a call to one of the tools.

    The arguments are any object, as in calls without a grammar: the schemas of all tools may be too
    large for one, or have keywords that grammars do not support.
    """
    root = "#/$defs/answer"
    call = _build_call_schema(tools, {"type": "object"})
    definitions = {"answer": _move_references(_without_id(answer), root)}
    return build_schema_grammar({"anyOf": [{"$ref": root}, call], "$defs": definitions})


def _build_call_schema(tools: Sequence[Tool], arguments: Mapping[str, Any]) -> dict[str, Any]:
    names = [tool.function.name for tool in tools]
    return {
        "type": "object",
        "properties": {"name": {"enum": names}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _build_arguments_schema(tool: Tool, root: str) -> dict[str, Any]:
    """Build the schema of the arguments, which is stored at `root` and requires an object.

    JSON Schema allows any further members by default. Many clients rely on this default, but their
    functions reject members that `properties` does not list, and small models invent them.
    """
    parameters = _without_id(tool.function.parameters or {})
    closing = {"additionalProperties": False} if _lists_members(parameters) else {}
    return {**_move_references(parameters, root), "type": "object", **closing}


def _without_id(schema: Mapping[str, Any]) -> dict[str, Any]:
    """With an `$id`, references with `#` would be relative to the `$id`, not to the root."""
    return {key: value for key, value in schema.items() if key != "$id"}


def _lists_members(schema: Mapping[str, Any]) -> bool:
    """Return whether `properties` alone describes the members, and has all required ones."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    return (
        _MEMBER_KEYWORDS.isdisjoint(schema)
        and isinstance(properties, Mapping)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    )


def _move_references(schema: Any, root: str) -> Any:
    """Rewrite the references `#` and `#/...` in a schema, which is moved to the path `root`."""
    if isinstance(schema, list):
        return [_move_references(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: _move_reference(value, root)
        if key == "$ref" and isinstance(value, str)
        else _move_references(value, root)
        for key, value in schema.items()
    }


def _move_reference(reference: str, root: str) -> str:
    is_pointer = reference == "#" or reference.startswith("#/")
    return root + reference.removeprefix("#") if is_pointer else reference
