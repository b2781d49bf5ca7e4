"""Tool calls: the tools that a request offers, and parsing of calls in generated text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from deployments.errors import InvalidField, MalformedBody
from deployments.ingress.apis.openai.schemas import ChatBody, Tool
from deployments.ingress.http.bodies import parse_json
from deployments.messages import Grammar

# Marks around a call in the chat templates of several model families.
OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_PREFIX_CHARS = 1_000  # number of first characters that decide whether a text may be a call
DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call by the model. `arguments` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallParser:
    """Parser of calls of the named functions, which are a whole text or its end.

    A call is a JSON object with `name` and `arguments` (or `parameters`), or a list of such
    objects. The marks OPEN and CLOSE may enclose a call. After other text, such as reasoning, only
    calls between marks count. A text with anything after a call has no call.
    """

    names: frozenset[str]
    _prefixes: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_prefixes", tuple(list_call_prefixes(self.names)))

    def may_start_tool_call(self, text: str) -> bool:
        start = "".join(text[:MAX_PREFIX_CHARS].split())
        return start.startswith(self._prefixes) or any(
            prefix.startswith(start) for prefix in self._prefixes
        )

    def count_content(self, text: str) -> int:
        """Return how many first characters cannot belong to a call, whatever follows `text`."""
        return 0 if self.may_start_tool_call(text) else self.find_marked_call(text)

    def find_marked_call(self, text: str) -> int:
        """Return where a marked call or, at the end, a part of OPEN begins; else the length."""
        start = 0
        while (found := text.find(OPEN, start)) >= 0:
            if self.may_start_tool_call(text[found:]):
                return found
            start = found + len(OPEN)
        begun = next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)
        return len(text) - begun

    def parse_tool_calls(self, text: str) -> tuple[FunctionCall, ...]:
        """Return the calls of a complete text; empty if the text has anything else."""
        calls: list[FunctionCall] = []
        for block in text.replace(CLOSE, OPEN).split(OPEN):
            if not block.strip():
                continue
            try:
                value = parse_json(block.encode("utf-8", "replace"))
            except MalformedBody:
                return ()
            for item in value if isinstance(value, list) else [value]:
                call = self._parse_call(item)
                if call is None:
                    return ()
                calls.append(call)
        return tuple(calls)

    def _parse_call(self, value: Any) -> FunctionCall | None:
        if not isinstance(value, dict) or value.get("name") not in self.names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, dict):
            return FunctionCall(value["name"], orjson.dumps(arguments).decode())
        return None


def list_call_prefixes(names: Iterable[str]) -> Iterator[str]:
    """Yield the possible starts of a call. They are compared with texts without white space."""
    for mark in ("", OPEN):
        for bracket in ("", "["):
            start = f"{mark}{bracket}{{"
            yield f'{start}"arguments":'
            yield f'{start}"parameters":'
            for name in names:
                yield f'{start}"name":"{name}"'


def offered_tools(body: ChatBody) -> Sequence[Tool]:
    return () if body.tool_choice == "none" else body.tools or ()


def forced_tools(body: ChatBody) -> Sequence[Tool]:
    """Return the tools from which the model must call one; empty if a call is optional.

    Raises InvalidField if `tool_choice` names a tool that is not offered.
    """
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return ()
    tools = body.tools or ()
    if choice == "required":
        if not tools:
            raise InvalidField("`tool_choice` needs `tools`", field="tool_choice")
        return tools
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    named = [tool for tool in tools if tool.function.name == name]
    if not named:
        raise InvalidField(
            "`tool_choice` must be `none`, `auto`, `required`, or name one of the `tools` as "
            '{"type": "function", "function": {"name": ...}}',
            field="tool_choice",
        )
    return named


def call_grammar(tools: Sequence[Tool]) -> Grammar:
    """Build the grammar of a call to one of the tools."""
    definitions: dict[str, Any] = {}
    schemas = [_build_call_schema(tool, definitions) for tool in tools]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if definitions:
        schema = {**schema, "$defs": definitions}
    return Grammar("json_schema", orjson.dumps(schema).decode())


def _build_call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """Build the schema of a call; move the definitions of the tool into `definitions`.

    References point to the root of the whole schema, which has the definitions of all tools.
    """
    function = tool.function
    parameters = function.parameters or {"type": "object", "properties": {}}
    prefix = f"{function.name}."
    for key in DEFINITIONS:
        if isinstance(tool_definitions := parameters.get(key), dict):
            for name, schema in tool_definitions.items():
                definitions[prefix + name] = _move_references(schema, prefix)
    arguments = {key: value for key, value in parameters.items() if key not in DEFINITIONS}
    return {
        "type": "object",
        "properties": {
            "name": {"enum": [function.name]},
            "arguments": _move_references(arguments, prefix),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _move_references(schema: Any, prefix: str) -> Any:
    """Add `prefix` to the names of referenced definitions."""
    if isinstance(schema, list):
        return [_move_references(item, prefix) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: _move_reference(value, prefix)
        if key == "$ref" and isinstance(value, str)
        else _move_references(value, prefix)
        for key, value in schema.items()
    }


def _move_reference(reference: str, prefix: str) -> str:
    for key in DEFINITIONS:
        start = f"#/{key}/"
        if reference.startswith(start):
            return f"#/$defs/{prefix}{reference.removeprefix(start)}"
    return reference
