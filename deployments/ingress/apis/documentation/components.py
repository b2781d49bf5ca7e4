"""JSON schemas of many origins in one document: named once, referred to from everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deployments.tasks.inputs import JsonSchema

DEFINITION = "#/$defs/"
COMPONENT = "#/components/schemas/"


class Components:
    """The `components.schemas` of a document, filled while it is written."""

    def __init__(self) -> None:
        self.schemas: dict[str, JsonSchema] = {}
        # What each name stands for, with all it refers to: equal ones share a name.
        self._definitions: dict[str, Mapping[str, JsonSchema]] = {}

    def add_schema(self, name: str, schema: JsonSchema) -> JsonSchema:
        """A reference to `schema`, kept under `name` or one like it."""
        own_name, new = self._assign_name({"": schema}, name)
        if new:
            self.schemas[own_name] = self._hoist(schema, {})
        return {"$ref": COMPONENT + own_name}

    def _assign_name(self, meaning: Mapping[str, JsonSchema], wished: str) -> tuple[str, bool]:
        """The name of what means this, and whether it is new."""
        known = next((name for name, one in self._definitions.items() if one == meaning), None)
        if known is not None:
            return known, False
        free = next(name for name in number_names(wished) if name not in self._definitions)
        self._definitions[free] = meaning
        return free, True

    def _hoist(self, node: JsonSchema, names: Mapping[str, str]) -> JsonSchema:
        """`node` with its `$defs` moved here; `names` are those of the definitions around it."""
        definitions = node.get("$defs")
        if isinstance(definitions, dict):
            names = {**names, **self._adopt(definitions)}
        return {
            key: COMPONENT + names[value.removeprefix(DEFINITION)]
            if key == "$ref" and value.startswith(DEFINITION)
            else self._hoist_value(value, names)
            for key, value in node.items()
            if key != "$defs"
        }

    def _hoist_value(self, node: Any, names: Mapping[str, str]) -> Any:
        """What stands inside a schema; the schema of a whole type gets its own name."""
        if isinstance(node, list):
            return [self._hoist_value(child, names) for child in node]
        if not isinstance(node, dict):
            return node
        title = node.get("title")
        if isinstance(title, str) and title.isidentifier() and "properties" in node:
            # A default is the field's that has this type, not the type's.
            return self.add_schema(title, {k: v for k, v in node.items() if k != "default"})
        return self._hoist(node, names)

    def _adopt(self, definitions: Mapping[str, JsonSchema]) -> dict[str, str]:
        """The definitions' names here. They may refer to each other, so all are named first."""
        names: dict[str, str] = {}
        new: list[str] = []
        for key in definitions:
            meaning = {name: definitions[name] for name in find_reachable(key, definitions)}
            names[key], is_new = self._assign_name({"": definitions[key], **meaning}, key)
            new += [key] if is_new else []
        for key in new:
            self.schemas[names[key]] = self._hoist(definitions[key], names)
        return names


def find_reachable(key: str, definitions: Mapping[str, JsonSchema]) -> set[str]:
    """The names of a definition and of all it refers to."""
    found: set[str] = set()
    open_names = [key]
    while open_names:
        name = open_names.pop()
        if name not in found:
            found.add(name)
            open_names += find_references(definitions[name])
    return found


def find_references(node: Any) -> Iterator[str]:
    """The names of the definitions that a schema refers to."""
    if isinstance(node, dict):
        target = node.get("$ref")
        if isinstance(target, str) and target.startswith(DEFINITION):
            yield target.removeprefix(DEFINITION)
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from find_references(child)


def number_names(name: str) -> Iterator[str]:
    """`name`, then `name2`, `name3` and so on."""
    yield name
    number = 2
    while True:
        yield f"{name}{number}"
        number += 1


def infer_schema(values: Sequence[Any]) -> JsonSchema:
    """A schema that all of these JSON values fit: types, keys, and which keys all objects have."""
    kinds = sorted({json_type(value) for value in values})
    schema: JsonSchema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    objects = [value for value in values if isinstance(value, dict)]
    if objects:
        keys = dict.fromkeys(key for one in objects for key in one)
        schema["properties"] = {
            key: infer_schema([one[key] for one in objects if key in one]) for key in keys
        }
        schema["required"] = [key for key in keys if all(key in one for one in objects)]
    items = [item for value in values if isinstance(value, list) for item in value]
    if items:
        schema["items"] = infer_schema(items)
    return schema


def json_type(value: Any) -> str:
    """The word JSON Schema has for the type of `value`."""
    kinds = {dict: "object", list: "array", bool: "boolean", str: "string", type(None): "null"}
    return kinds.get(type(value), "number")
