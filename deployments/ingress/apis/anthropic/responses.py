"""Responses of the Messages API, built from those of OpenAI's chat."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec
import orjson

from deployments.ingress.apis.anthropic.schemas import (
    AnthropicMessage,
    ContentBlock,
    MessageEnd,
    MessageUsage,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolUseContent,
)
from deployments.ingress.apis.openai.chat import build_choice, build_tool_call_parser
from deployments.ingress.apis.openai.responses import build_usage
from deployments.ingress.apis.openai.schemas import ChatBody, FinishReasonWord, ResponseToolCall
from deployments.ingress.requests import GenerationResponse
from deployments.messages import Finished, FinishReason, Started
from deployments.registry import RegisteredModel

STOP_REASONS: dict[FinishReason, StopReason] = {
    FinishReason.LENGTH: "max_tokens",
    FinishReason.END: "end_turn",
    FinishReason.STOP: "stop_sequence",
}
OPEN_END = MessageEnd(stop_reason=None, stop_sequence=None)  # of a message that goes on


def build_message_response(response: GenerationResponse, chat: ChatBody) -> AnthropicMessage:
    (completion,) = response.completions
    choice = build_choice(0, completion, build_tool_call_parser(chat), with_logprobs=False)
    message = choice["message"]
    content: list[ContentBlock] = []
    if reasoning := message.get("reasoning_content"):
        content.append(ThinkingContent(type="thinking", thinking=reasoning, signature=""))
    if text := message["content"]:
        content.append(TextContent(type="text", text=text))
    content += map(build_tool_use, message.get("tool_calls", ()))
    return build_message(
        response.model,
        content,
        build_message_end(completion.finished, choice["finish_reason"]),
        build_message_usage(completion.started, [completion.finished]),
    )


def build_message(
    model: RegisteredModel, content: list[ContentBlock], end: MessageEnd, usage: MessageUsage
) -> AnthropicMessage:
    return AnthropicMessage(
        id=f"msg_{uuid.uuid4().hex}",
        type="message",
        role="assistant",
        model=model.ref.id,
        content=content,
        usage=usage,
        **end,
    )


def build_tool_use(call: ResponseToolCall) -> ToolUseContent:
    function = call["function"]
    return ToolUseContent(
        type="tool_use",
        id=call["id"],
        name=function["name"],
        input=orjson.Fragment(build_input(function["arguments"])),
    )


def build_input(arguments: str) -> str:
    """Return the input of a call as JSON, which is `{}` for arguments that were cut short.

    As in Anthropic's API, a message may end with such a call. Its `stop_reason`, which is not
    `tool_use`, tells clients not to run the call.
    """
    try:
        msgspec.json.decode(arguments, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return "{}"
    return arguments


def build_message_end(finished: Finished, finish_reason: FinishReasonWord) -> MessageEnd:
    if finish_reason == "tool_calls":
        return MessageEnd(stop_reason="tool_use", stop_sequence=None)
    return MessageEnd(
        stop_reason=STOP_REASONS[finished.reason], stop_sequence=finished.stop or None
    )


def build_message_usage(started: Started, finished: Sequence[Finished]) -> MessageUsage:
    """Count the tokens of a message; `finished` is empty before its end."""
    usage = build_usage([started], finished, 1)
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    built = MessageUsage(
        input_tokens=usage["prompt_tokens"] - cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached_tokens,
        output_tokens=usage["completion_tokens"],
    )
    if (details := usage.get("completion_tokens_details")) is not None:
        built["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
    return built
