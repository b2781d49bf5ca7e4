"""How much one request may ask a model to go on from, whichever API it came through.

Fields are those of a question: `prompt`, `prompt[3]` of several, `prompt[3].content` of a
conversation's messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import orjson

from deployments.config import LimitSettings
from deployments.errors import InputTooLong, TooManyItems
from deployments.generation.messages import Chat, Prompt
from deployments.messages import Text, Truncation, count_characters
from deployments.tasks import TaskInput


def limit_text_length(parsed: TaskInput, item_chars: int) -> TaskInput:
    """`parsed` with no text longer than `item_chars`, so that tokenization is bounded too.

    Each segment of a pair may be that long.

    Raises InputTooLong unless truncation was asked for. A task that answers in characters loses no
    start of a text: that would shift its answers.
    """
    if all(longest_segment(text) <= item_chars for text in parsed.texts):
        return parsed
    shifting = parsed.windowing is not None and parsed.truncation is Truncation.KEEP_END
    if parsed.truncation is Truncation.REFUSE or shifting:
        lengths = [longest_segment(text) for text in parsed.texts]
        i = next(i for i, length in enumerate(lengths) if length > item_chars)
        raise InputTooLong(
            f"`{parsed.fields[i]}` has {lengths[i]} characters, at most {item_chars} "
            "are read; shorten it or ask for truncation",
            field=parsed.fields[i],
        )
    kept = (
        slice(-item_chars, None) if parsed.truncation is Truncation.KEEP_END else slice(item_chars)
    )
    return replace(parsed, texts=tuple(truncate_text(text, kept) for text in parsed.texts))


def longest_segment(text: Text) -> int:
    """Characters of a text; of a pair, those of its longer segment."""
    return len(text) if isinstance(text, str) else max(map(len, text))


def truncate_text(text: Text, kept: slice) -> Text:
    """`text[kept]`; each segment of a pair on its own."""
    return text[kept] if isinstance(text, str) else (text[0][kept], text[1][kept])


def check_total_length(parsed: TaskInput, request_chars: int) -> TaskInput:
    """`parsed`, whose texts are tokenized together in one go while other requests wait.

    A small body can ask for much: a query is read once with every text, a text with every label.
    Raises InputTooLong.
    """
    check_total(parsed.many, sum(map(count_characters, parsed.texts)), request_chars)
    return parsed


def check_total(path: str, total: int, most: int) -> None:
    """Bound the characters that what is at `path` makes. Raises InputTooLong."""
    if total > most:
        raise InputTooLong(
            f"`{path}` makes {total} characters to read, at most {most} are read at once",
            field=path,
        )


def check_count(path: str, items: int, most: int) -> None:
    """Bound the items at `path`. Raises TooManyItems."""
    if items > most:
        raise TooManyItems(f"`{path}` has {items} items; at most {most} are taken", field=path)


# Texts that end an answer, and characters of each.
MAX_STOPS = 16
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
