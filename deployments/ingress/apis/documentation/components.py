"""Schemas of an OpenAPI document. Each schema is stored once and referenced by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deployments.tasks.inputs import JsonSchema

DEFINITION = "#/$defs/"
COMPONENT = "#/components/schemas/"


class Components:
    """The `components.schemas` of a document, filled while the document is built."""

    def __init__(self) -> None:
        self.schemas: dict[str, JsonSchema] = {}
        # By component name: the schema, with all definitions that it references. Equal schemas
        # share a name.
        self._definitions: dict[str, Mapping[str, JsonSchema]] = {}

    def add_schema(self, name: str, schema: JsonSchema) -> JsonSchema:
        """Return a reference to `schema`; add it as `name` unless the document has an equal schema.

        If another schema has this name, append a number to the name.
        """
        assigned_name, is_new = self._assign_name({"": schema}, name)
        if is_new:
            self.schemas[assigned_name] = self._hoist(schema, {})
        return {"$ref": COMPONENT + assigned_name}

    def _assign_name(self, definition: Mapping[str, JsonSchema], name: str) -> tuple[str, bool]:
        """Return the component name of a definition, and whether the definition is new.

        `definition` maps "" to the schema. It also maps the name of each definition that the schema
        references to this definition.
        """
        for known_name, known in self._definitions.items():
            if known == definition:
                return known_name, False
        free_name = next(n for n in number_names(name) if n not in self._definitions)
        self._definitions[free_name] = definition
        return free_name, True

    def _hoist(self, node: JsonSchema, names: Mapping[str, str]) -> JsonSchema:
        """Return `node` with its `$defs` moved to the components.

        `names` maps the definitions of enclosing schemas to component names.
        """
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
        """Replace each schema in `node` that has a title and properties by a reference."""
        if isinstance(node, list):
            return [self._hoist_value(child, names) for child in node]
        if not isinstance(node, dict):
            return node
        title = node.get("title")
        if isinstance(title, str) and title.isidentifier() and "properties" in node:
            # The default belongs to one field, but other fields may reference the same schema.
            return self.add_schema(title, {k: v for k, v in node.items() if k != "default"})
        return self._hoist(node, names)

    def _adopt(self, definitions: Mapping[str, JsonSchema]) -> dict[str, str]:
        """Add definitions to the components; return their component names.

        Definitions may reference each other, so all are named before any is hoisted.
        """
        names: dict[str, str] = {}
        new_keys: list[str] = []
        for key in definitions:
            referenced = {name: definitions[name] for name in find_reachable(key, definitions)}
            names[key], is_new = self._assign_name({"": definitions[key], **referenced}, key)
            new_keys += [key] if is_new else []
        for key in new_keys:
            self.schemas[names[key]] = self._hoist(definitions[key], names)
        return names


def find_reachable(key: str, definitions: Mapping[str, JsonSchema]) -> set[str]:
    """Return the name of a definition, and of all that it references directly or indirectly."""
    reachable: set[str] = set()
    pending = [key]
    while pending:
        name = pending.pop()
        if name not in reachable:
            reachable.add(name)
            pending += find_references(definitions[name])
    return reachable


def find_references(node: Any) -> Iterator[str]:
    """Yield the names of the definitions that a schema references."""
    if isinstance(node, dict):
        target = node.get("$ref")
        if isinstance(target, str) and target.startswith(DEFINITION):
            yield target.removeprefix(DEFINITION)
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from find_references(child)


def number_names(name: str) -> Iterator[str]:
    """Yield `name`, `name2`, `name3` and so on."""
    yield name
    number = 2
    while True:
        yield f"{name}{number}"
        number += 1


def infer_schema(values: Sequence[Any]) -> JsonSchema:
    """Infer a schema that fits all values: types, properties and required keys."""
    types = sorted({json_type(value) for value in values})
    schema: JsonSchema = {"type": types[0] if len(types) == 1 else types}
    objects = [value for value in values if isinstance(value, dict)]
    if objects:
        keys = dict.fromkeys(key for value in objects for key in value)
        schema["properties"] = {
            key: infer_schema([value[key] for value in objects if key in value]) for key in keys
        }
        schema["required"] = [key for key in keys if all(key in value for value in objects)]
    items = [item for value in values if isinstance(value, list) for item in value]
    if items:
        schema["items"] = infer_schema(items)
    return schema


def json_type(value: Any) -> str:
    types = {dict: "object", list: "array", bool: "boolean", str: "string", type(None): "null"}
    return types.get(type(value), "number")
