"""How much one request may ask a model to go on from, whichever API it came through.

Fields are those of a question: `prompt`, `prompt[3]` of several, `prompt[3].content` of a
conversation's messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from deployments.config import LimitSettings
from deployments.errors import InputTooLong
from deployments.generation.messages import Chat, Prompt
from deployments.ingress.lengths import check_count, check_total

# Texts that end an answer, and characters of each.
MOST_STOPS = 16
STOP_CHARS = 1_000


def check_prompts(prompts: Sequence[Prompt], times: int, limits: LimitSettings) -> None:
    """Bound what is tokenized, and read `times` over. Raises TooManyItems or InputTooLong."""
    check_count("prompt", len(prompts), limits.items)
    single = len(prompts) == 1
    sizes = [
        _checked_size(prompt, "prompt" if single else f"prompt[{i}]", limits)
        for i, prompt in enumerate(prompts)
    ]
    check_total("prompt", sum(sizes) * times, limits.request_chars)


def _checked_size(prompt: Prompt, path: str, limits: LimitSettings) -> int:
    """Characters of a prompt, or token ids. A conversation becomes one text."""
    if not isinstance(prompt, Chat):
        what = "characters" if isinstance(prompt, str) else "token ids"
        return _bounded(len(prompt), what, path, limits)
    check_count("prompt", len(prompt.messages), limits.items)
    told = 0
    for i, message in enumerate(prompt.messages):
        told += _bounded(len(message["content"]), "characters", f"{path}[{i}].content", limits)
        if "tool_calls" in message:
            told += len(orjson.dumps(message["tool_calls"]))
    told += len(orjson.dumps(prompt.tools)) if prompt.tools else 0
    return _bounded(told, "characters in all", path, limits)


def _bounded(size: int, what: str, path: str, limits: LimitSettings) -> int:
    if size > limits.item_chars:
        raise InputTooLong(
            f"`{path}` has {size} {what}, at most {limits.item_chars} are read", field=path
        )
    return size
