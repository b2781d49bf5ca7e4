"""Bodies of the Messages API, translated into bodies of OpenAI's chat, which are parsed there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from deployments.errors import InvalidField
from deployments.ingress.apis.anthropic.schemas import (
    Block,
    CustomTool,
    InputMessage,
    MessagesBody,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from deployments.ingress.apis.openai.translated_chat import TranslatedChat, parse_translated_chat
from deployments.ingress.apis.shared.unsupported_fields import (
    UnsupportedFields,
    reject_unsupported_fields,
)
from deployments.ingress.request_options import RequestOptions
from deployments.registry import RegisteredModel

# Block types of each role.
BLOCK_TYPES: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
UNSUPPORTED_FIELDS: UnsupportedFields = {
    "mcp_servers": (([],), "call the servers in the client, and send their tools in `tools`"),
    "container": ((), "omit it"),
    "output_format": ((), "send `output_config.format`"),  # its name in the beta
}
ERROR_PREFIX = "Error: "  # of a tool result with `is_error`: chat templates have no such flag
# Values of the template variable `enable_thinking`. With `adaptive`, or without `thinking`, the
# chat template and the model decide.
ENABLES_THINKING = {"enabled": True, "disabled": False}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
FIELD_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}


class ThreadUnsupported(InvalidField):
    """The body names a conversation that the server would keep.

    The SDK's tool runner knows this code, and sends the whole conversation instead.
    """

    code = "thread_unsupported_request"


class _Part(NamedTuple):
    """A block as a part of a message of the chat."""

    role: str
    path: str  # of the content of its message, or of a tool result
    block: Block


def parse_messages(
    body: PromptBody, model: RegisteredModel, options: RequestOptions
) -> TranslatedChat:
    """Parse a body. Raises InvalidField or EmptyInput."""
    if body.thread is not None:
        raise ThreadUnsupported(
            "`thread` is not supported; send all `messages` of the conversation", field="thread"
        )
    reject_unsupported_fields(body, UNSUPPORTED_FIELDS)
    groups = list(_group_parts(_list_parts(body)))
    if isinstance(body, MessagesBody) and groups and groups[-1][0].role == "assistant":
        raise InvalidField(
            "`messages` ends with a message of the role `assistant`, which this server does not "
            "continue. Send a message of the role `user` after it.",
            field="messages",
        )
    names = dict(FIELD_NAMES)
    for index in range(len(body.tools or ())):
        names[f"tools[{index}].function"] = f"tools[{index}]"
        names[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
    messages = [_build_message(parts) for parts in groups]
    fields = {"messages": messages, **_translate_fields(body)}
    paths = [first.path for first, *_ in groups]
    return parse_translated_chat(fields, names, paths, model, options)


def _list_parts(body: PromptBody) -> Iterator[_Part]:
    if body.system:
        yield _Part("system", "system", TextBlock(type="text", text=_join(body.system)))
    for index, message in enumerate(body.messages):
        yield from _list_message_parts(message, f"messages[{index}].content")


def _list_message_parts(message: InputMessage, path: str) -> Iterator[_Part]:
    """Yield the parts of a message. Raises InvalidField for a block that its role cannot have."""
    known = BLOCK_TYPES[message.role]
    for index, block in enumerate(message.blocks):
        if block.type not in known:
            field = f"{path}[{index}].type"
            names = ", ".join(f"`{name}`" for name in known)
            raise InvalidField(
                f"`{field}` is `{block.type}`; the role `{message.role}` may have {names}",
                field=field,
            )
        if isinstance(block, ToolResultBlock):
            yield _Part("tool", f"{path}[{index}].content", block)
        else:
            yield _Part(message.role, path, block)


def _group_parts(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Group the parts of each message of the chat.

    As in Anthropic's API, consecutive messages of one role are one. Each tool result is a message.
    """
    for _, group in groupby(parts, lambda part: part.path if part.role == "tool" else part.role):
        yield list(group)


def _build_message(parts: list[_Part]) -> dict[str, Any]:
    blocks = [part.block for part in parts]
    if isinstance(result := blocks[0], ToolResultBlock):
        prefix = ERROR_PREFIX if result.is_error else ""
        content = prefix + _join(result.content or "")
        return {"role": "tool", "content": content, "tool_call_id": result.tool_use_id}
    return {
        "role": parts[0].role,
        "content": _join([block for block in blocks if isinstance(block, TextBlock)]),
        "reasoning_content": "\n".join(
            block.thinking for block in blocks if isinstance(block, ThinkingBlock)
        ),
        "tool_calls": [
            {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ],
    }


def _join(texts: str | list[TextBlock]) -> str:
    return texts if isinstance(texts, str) else "\n".join(block.text for block in texts)


def _translate_fields(body: PromptBody) -> dict[str, Any]:
    """Translate all fields but the messages and the system prompt."""
    fields: dict[str, Any] = {}
    if body.tools is not None:
        fields["tools"] = [_translate_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = _translate_tool_choice(body.tool_choice, body.tools or ())
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None and body.thinking.type in ENABLES_THINKING:
        variables = {"enable_thinking": ENABLES_THINKING[body.thinking.type]}
        fields["chat_template_kwargs"] = variables
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
        if (output := body.output_config.format) is not None:
            schema = {"schema": output.json_schema}
            fields["response_format"] = {"type": output.type, "json_schema": schema}
    if isinstance(body, MessagesBody):
        fields["stop"] = body.stop_sequences
        for name in ("max_tokens", "temperature", "top_k", "top_p"):
            fields[name] = getattr(body, name)
    return fields


def _translate_tool(tool: CustomTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _translate_tool_choice(choice: ToolChoice, tools: Iterable[CustomTool]) -> Any:
    if choice.type != "tool":
        return TOOL_CHOICES[choice.type]
    if choice.name not in [tool.name for tool in tools]:
        path = "tool_choice.name"
        raise InvalidField(f"`{path}` must be the name of one of the `tools`", field=path)
    return {"type": "function", "function": {"name": choice.name}}
