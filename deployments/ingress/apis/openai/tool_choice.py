"""The tools that a request offers, and those of which the model must call one."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.errors import InvalidField
from deployments.ingress.apis.openai.schemas import ChatBody, Tool


def offered_tools(body: ChatBody) -> Sequence[Tool]:
    return () if body.tool_choice == "none" else body.tools or ()


def forced_tools(body: ChatBody) -> Sequence[Tool]:
    """Return the tools from which the model must call one; empty if a call is optional.

    Raises InvalidField if `tool_choice` is invalid, names a tool that is not offered, or requires a
    call although no tools are offered.
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
