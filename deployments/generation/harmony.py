"""Conversations in Harmony, the format of GPT-OSS, and its marks.

Source of the format: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

MARKS = START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
TURN_ENDS = "<|return|>", "<|call|>"  # end the last message of a turn
BETWEEN = "\n\n"  # text between two texts that become one


def is_harmony(template: str) -> bool:
    """Return whether a chat template writes this format."""
    return all(mark in template for mark in MARKS)


def adapt_messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the messages as GPT-OSS's template expects them.

    It names the reasoning `thinking`, and rejects it next to both content and calls. It renders one
    call per message, and takes the results after a message for those of this call.
    """
    left = deque(messages)
    while left:
        message = {**left.popleft()}
        calls = message.get("tool_calls") or []
        if reasoning := message.get("reasoning_content"):
            content = message.get("content")
            if calls and content:
                reasoning, message["content"] = f"{reasoning}{BETWEEN}{content}", ""
            message["thinking"] = reasoning
        if len(calls) < 2:
            yield message
            continue
        # Results by the id of their call.
        results: defaultdict[Any, deque[Mapping[str, Any]]] = defaultdict(deque)
        while left and left[0].get("role") == "tool":
            result = left.popleft()
            results[result.get("tool_call_id")].append(result)
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": message["role"], "content": ""}
            yield {**first, "tool_calls": [call]}
            if own := results[call.get("id")]:
                yield own.popleft()
        yield from chain(*results.values())


def adapt_tools(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the tools with a description each: GPT-OSS's template needs one."""
    functions = (tool["function"] for tool in tools)
    described = ({**each, "description": each.get("description") or ""} for each in functions)
    return [{**tool, "function": each} for tool, each in zip(tools, described, strict=True)]
