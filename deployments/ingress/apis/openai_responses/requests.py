"""Bodies of the Responses API, translated into bodies of OpenAI's chat, which are parsed there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.errors import InvalidField
from deployments.ingress.apis.openai.schemas import GenerationBody
from deployments.ingress.apis.openai.translated_chat import TranslatedChat, parse_translated_chat
from deployments.ingress.apis.openai_responses.schemas import (
    NOT_STORED,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    MessageItem,
    ReasoningInputItem,
    ResponsesBody,
)
from deployments.ingress.apis.shared.unsupported_fields import (
    UnsupportedFields,
    reject_unsupported_fields,
)
from deployments.ingress.request_options import RequestOptions
from deployments.registry import RegisteredModel

LOGPROBS = "message.output_text.logprobs"
UNSUPPORTED_FIELDS: UnsupportedFields = {
    "previous_response_id": ((), f"send the earlier items in `input`, {NOT_STORED}"),
    "conversation": ((), f"send the earlier items in `input`, {NOT_STORED}"),
    "prompt": ((), "send its text in `instructions` and `input`"),
    "background": ((False,), f"wait for the response, or send `stream`, {NOT_STORED}"),
    "truncation": (("disabled",), "remove items from `input`"),
    "messages": ((), "send `input`"),
    "functions": (([],), "send `tools`"),
    "function_call": ((), "send `tool_choice`"),
    "logprobs": ((False,), "send `top_logprobs`"),
    "include_reasoning": ((True,), "ignore items of the type `reasoning`"),
    "separate_reasoning": ((True,), "join the items `reasoning` and `message`"),
    "reasoning_format": (("auto", "deepseek"), "join the items `reasoning` and `message`"),
    "n": ((1,), "send several requests"),
    "max_tokens": ((), "send `max_output_tokens`"),
    "max_completion_tokens": ((), "send `max_output_tokens`"),
    "reasoning_effort": ((), "send `reasoning.effort`"),
    "response_format": ((), "send `text.format`"),
}
# Names of the fields of a chat in the body.
FIELD_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
}
ChatMessageFields = dict[str, Any]  # a message in the body of a chat


def parse_responses(
    body: ResponsesBody, model: RegisteredModel, options: RequestOptions
) -> TranslatedChat:
    """Parse a body. Raises InvalidField or EmptyInput."""
    reject_unsupported_fields(body, UNSUPPORTED_FIELDS)
    if body.input is None:
        raise InvalidField("Error in `input`: field required", field="input")
    messages, paths = _build_messages(body)
    fields = {
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "tools": None if body.tools is None else [_nest_tool(tool) for tool in body.tools],
        "tool_choice": _nest_tool_choice(body.tool_choice, body.tools or ()),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _nest_format(body.text.format) if body.text else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        "logprobs": bool(body.top_logprobs) or LOGPROBS in (body.include or ()),
        "top_logprobs": body.top_logprobs,
        **{name: getattr(body, name) for name in GenerationBody.model_fields},
    }
    return parse_translated_chat(fields, FIELD_NAMES, paths, model, options)


def _build_messages(body: ResponsesBody) -> tuple[list[ChatMessageFields], list[str]]:
    """Return the messages of the chat, and the paths of their contents in the body.

    Reasoning, text and calls that follow in this order are one message of the assistant.
    """
    messages: list[ChatMessageFields] = []
    paths: list[str] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
        paths.append("instructions")
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
        paths.append("input")
        return messages, paths
    for index, item in enumerate(body.input or ()):
        message = _translate_item(item)
        if message.get("reasoning_content") == "":
            continue  # reasoning that only its author can read, or none
        if messages and _continues(messages[-1], message):
            _extend(messages[-1], message)
        else:
            messages.append(message)
            paths.append(f"input[{index}]")
        if isinstance(item, FunctionOutputItem):
            paths[-1] = f"input[{index}].output"
        elif isinstance(item, MessageItem):
            paths[-1] = f"input[{index}].content"
    if not messages:
        raise InvalidField(
            "`input` has only reasoning that this server cannot read; send a message too",
            field="input",
        )
    return messages, paths


def _translate_item(item: Any) -> ChatMessageFields:
    match item:
        case ReasoningInputItem():
            text = "\n".join(part.text for part in item.content or item.summary or ())
            return {"role": "assistant", "reasoning_content": text}
        case FunctionCallItem():
            function = {"name": item.name, "arguments": item.arguments}
            return {"role": "assistant", "tool_calls": [{"id": item.call_id, "function": function}]}
        case FunctionOutputItem():
            content = _join(item.output)
            return {"role": "tool", "tool_call_id": item.call_id, "content": content}
        case _:
            # An empty list stays one: whether it is valid depends on the calls that follow.
            return {"role": item.role, "content": item.content and _join(item.content)}


def _continues(message: ChatMessageFields, added: ChatMessageFields) -> bool:
    """Return whether `added` belongs to `message`, a message of the assistant."""
    if not message["role"] == added["role"] == "assistant":
        return False
    if "tool_calls" in added:
        return True
    return "tool_calls" not in message and "content" not in message


def _extend(message: ChatMessageFields, added: ChatMessageFields) -> None:
    """Add a part of a turn to `message`, which it continues."""
    if "tool_calls" in added:
        message.setdefault("tool_calls", []).extend(added["tool_calls"])
    elif "reasoning_content" in added:
        message["reasoning_content"] += f"\n{added['reasoning_content']}"
    else:
        message["content"] = added["content"]


def _join(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _nest_tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(exclude_none=True, exclude={"type"})
    return {"type": "function", "function": function}


def _nest_tool_choice(choice: Any, tools: Sequence[FunctionTool]) -> Any:
    if choice in (None, "none", "auto", "required"):
        return choice
    is_function = isinstance(choice, dict) and choice.get("type") == "function"
    name = choice.get("name") if is_function else None
    if name not in [tool.name for tool in tools]:
        raise InvalidField(
            "`tool_choice` must be `none`, `auto`, `required`, or name one of the `tools` as "
            '{"type": "function", "name": ...}',
            field="tool_choice",
        )
    return {"type": "function", "function": {"name": name}}


def _nest_format(text_format: dict[str, Any] | None) -> dict[str, Any] | None:
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    named = {key: value for key, value in text_format.items() if key != "type"}
    return {"type": "json_schema", "json_schema": named}
