"""Calls of functions: which a model may make, and finding them in what it wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from deployments.errors import InvalidField, MalformedBody
from deployments.generation.messages import Grammar
from deployments.ingress.apis.openai.schemas import ChatBody, Tool
from deployments.ingress.http.bodies import parse_json

# How the templates of several families of models mark a call.
OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Characters in which a call shows itself as one, spaces included.
MAX_PREFIX_CHARS = 1_000
DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call that the model made; `arguments` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallParser:
    """Reads answers that may be calls of the functions named.

    A call is a JSON object with a `name` and `arguments` (or `parameters`), or a list of these, by
    itself or between the marks; and it is the whole answer.
    """

    names: frozenset[str]
    _prefixes: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_prefixes", tuple(list_call_prefixes(self.names)))

    def may_start_tool_call(self, text: str) -> bool:
        """Whether an answer that begins with `text` may still be a call."""
        head = "".join(text[:MAX_PREFIX_CHARS].split())
        return head.startswith(self._prefixes) or any(
            one.startswith(head) for one in self._prefixes
        )

    def parse_tool_calls(self, text: str) -> tuple[FunctionCall, ...]:
        """The calls that a whole answer is; none where it is something else."""
        calls: list[FunctionCall] = []
        for block in text.replace(CLOSE, OPEN).split(OPEN):
            if not block.strip():
                continue
            try:
                value = parse_json(block.encode("utf-8", "replace"))
            except MalformedBody:
                return ()
            for one in value if isinstance(value, list) else [value]:
                call = self._call(one)
                if call is None:
                    return ()
                calls.append(call)
        return tuple(calls)

    def _call(self, value: Any) -> FunctionCall | None:
        if not isinstance(value, dict) or value.get("name") not in self.names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, dict):
            return FunctionCall(value["name"], orjson.dumps(arguments).decode())
        return None


def list_call_prefixes(names: Iterable[str]) -> Iterator[str]:
    """How a call of one of the functions may begin, without its spaces."""
    for mark in ("", OPEN):
        for bracket in ("", "["):
            start = f"{mark}{bracket}{{"
            yield f'{start}"arguments":'
            yield f'{start}"parameters":'
            for name in names:
                yield f'{start}"name":"{name}"'


def offered_tools(body: ChatBody) -> Sequence[Tool]:
    """Those that the model may call."""
    return () if body.tool_choice == "none" else body.tools or ()


def forced_tools(body: ChatBody) -> Sequence[Tool]:
    """Those of which the answer must call one; none where that is the model's choice.

    Raises InvalidField.
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
    """What a call of one of the tools looks like."""
    definitions: dict[str, Any] = {}
    forms = [_call_schema(tool, definitions) for tool in tools]
    schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
    if definitions:
        schema = {**schema, "$defs": definitions}
    return Grammar("json_schema", orjson.dumps(schema).decode())


def _call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call; its definitions move to `definitions`, where a root has them."""
    function = tool.function
    parameters = function.parameters or {"type": "object", "properties": {}}
    prefix = f"{function.name}."
    for key in DEFINITIONS:
        if isinstance(own := parameters.get(key), dict):
            definitions.update({prefix + k: _move_references(v, prefix) for k, v in own.items()})
    bare = {key: value for key, value in parameters.items() if key not in DEFINITIONS}
    return {
        "type": "object",
        "properties": {
            "name": {"enum": [function.name]},
            "arguments": _move_references(bare, prefix),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _move_references(schema: Any, prefix: str) -> Any:
    """A schema whose references lead to where its definitions are now."""
    if isinstance(schema, list):
        return [_move_references(one, prefix) for one in schema]
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
