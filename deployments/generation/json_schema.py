"""JSON schemas as clients mean them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Keywords whose value is a schema or a list of schemas, and keywords whose value maps names to
# schemas. Values of other keywords, such as `const` and `examples`, are data. `not` and `if` are
# left out: a type inside would change for which values they hold.
SCHEMA_KEYWORDS = (
    *("items", "prefixItems", "additionalItems", "contains", "additionalProperties"),
    *("allOf", "anyOf", "oneOf", "then", "else"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Keywords that state the type of a value themselves.
TYPING_KEYWORDS = {"type", "$ref", "enum", "const", "anyOf", "oneOf", "allOf"}


def state_objects(schema: Any) -> Any:
    """Add `"type": "object"` to each schema with `properties` that states no type.

    The standard lets such a schema match strings and numbers too. But the examples of
    huggingface_hub and of text-generation-inference omit the type and expect an object. Changes
    `schema` in place and returns it.
    """
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        if "properties" in node and TYPING_KEYWORDS.isdisjoint(node):
            node["type"] = "object"
        waiting += _list_parts(node)
    return schema


def _list_parts(node: dict[str, Any]) -> Iterator[Any]:
    for keyword in SCHEMA_KEYWORDS:
        part = node.get(keyword)
        yield from part if isinstance(part, list) else (part,)
    for keyword in SCHEMA_MAPS:
        if isinstance(named := node.get(keyword), dict):
            yield from named.values()
