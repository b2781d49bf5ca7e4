"""JSON schemas as clients mean them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
# Values of keywords without an effect, which generators of schemas write nevertheless. llguidance
# knows neither keyword of the first two, and null is no value of the others.
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": ({}, True, {"type": "string"}),
    **dict.fromkeys(("properties", "required", "items", "enum"), (None,)),
}
# Keywords that state the type of a value themselves.
TYPING_KEYWORDS = {"type", "$ref", "enum", "const", "anyOf", "oneOf", "allOf"}


def normalize_schema(schema: Any) -> Any:
    """Remove keywords without an effect, and state the type of objects. Return the changed schema.

    Each schema with `properties` that states no type gets `"type": "object"`. The standard lets it
    match strings and numbers too, but the examples of huggingface_hub and of
    text-generation-inference omit the type and expect an object.
    """
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        for keyword, values in _WITHOUT_EFFECT.items():
            if keyword in node and node[keyword] in values:
                del node[keyword]
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
