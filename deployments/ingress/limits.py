"""Size limits of one request, the same for every API.

Errors name the fields of the internal request: `prompt`, `prompt[3]` for one of several prompts,
`prompt[3].content` for a chat message. Each API renames these fields for its clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from deployments.artifacts.manifest import ArtifactManifest
from deployments.config import LimitSettings
from deployments.errors import InputTooLong, TooManyItems
from deployments.messages import Chat, Prompt, Text, Truncation, count_characters
from deployments.tasks import TaskInput

# Maximum number of stop strings per request, and maximum characters of a stop string.
MAX_STOPS = 16
MAX_STOP_CHARS = 1_000
# Texts of a chat message beside its content, which chat templates read too.
UNBOUNDED_KEYS = ("reasoning_content", "tool_call_id", "name")


def limit_text_length(parsed: TaskInput, item_chars: int) -> TaskInput:
    """Truncate each text, or each segment of a pair, to `item_chars` before tokenization.

    Raises InputTooLong for a longer text in two cases: the request does not allow truncation, or a
    cut at the start would shift the character offsets in the answer.
    """
    if all(longest_segment(text) <= item_chars for text in parsed.texts):
        return parsed
    shifts_offsets = parsed.windowing is not None and parsed.truncation is Truncation.KEEP_END
    if parsed.truncation is Truncation.REFUSE or shifts_offsets:
        i = next(i for i, text in enumerate(parsed.texts) if longest_segment(text) > item_chars)
        field, length = _find_longest_part(parsed, i)
        remedy = "let it be cut at its end" if shifts_offsets else "request truncation"
        raise InputTooLong(
            f"`{field}` has {length} characters; the maximum is {item_chars}. "
            f"Shorten it or {remedy}.",
            field=field,
        )
    side = (
        slice(-item_chars, None) if parsed.truncation is Truncation.KEEP_END else slice(item_chars)
    )
    cut: dict[str, str] = {}  # all pairs share one copy of a long query

    def shorten(part: str) -> str:
        if len(part) <= item_chars:
            return part
        if part not in cut:
            cut[part] = part[side]
        return cut[part]

    texts = (
        shorten(text) if isinstance(text, str) else tuple(map(shorten, text))
        for text in parsed.texts
    )
    return replace(parsed, texts=tuple(texts))


def longest_segment(text: Text) -> int:
    """Count the characters of a text, or of the longest part of a pair."""
    return len(text) if isinstance(text, str) else max(map(len, text))


def _find_longest_part(parsed: TaskInput, index: int) -> tuple[str, int]:
    """Return the path and the characters of a text, or of the longest part of a pair."""
    text, field = parsed.texts[index], parsed.fields[index]
    if isinstance(text, str):
        return field, len(text)
    part = max(range(len(text)), key=lambda i: len(text[i]))
    shared = parsed.part_fields[part] if parsed.part_fields else None
    return shared or field, len(text[part])


def count_tokenized(parsed: TaskInput, manifest: ArtifactManifest) -> int:
    """Count the characters that the tokenizer reads. With a pair template they are more."""
    template = manifest.pair_template
    own = 0 if template is None else len(parsed.texts) * template.characters
    return own + sum(map(count_characters, parsed.texts))


def check_total_length(parsed: TaskInput, request_chars: int) -> TaskInput:
    """Check the number of characters that one tokenizer call reads. Raises InputTooLong.

    A small body can expand: reranking reads the query once per text, and zero-shot classification
    reads a text once per label.
    """
    check_total(parsed.many, sum(map(count_characters, parsed.texts)), request_chars)
    return parsed


def check_total(path: str, total: int, max_chars: int) -> None:
    if total > max_chars:
        raise InputTooLong(
            f"`{path}` makes {total} characters in total; the maximum is {max_chars}. Send fewer "
            "or shorter texts.",
            field=path,
        )


def check_count(path: str, items: int, max_items: int) -> None:
    if items > max_items:
        raise TooManyItems(
            f"`{path}` has {items} items; the maximum is {max_items}. Split the request.",
            field=path,
        )


def check_pairs(path: str, other: str, pairs: int, max_items: int) -> None:
    """Raise TooManyItems if two lists have more than `max_items` pairs of items."""
    if pairs > max_items:
        raise TooManyItems(
            f"`{path}` and `{other}` make {pairs} pairs; the maximum is {max_items}. Split the "
            "request.",
            field=path,
        )


def check_prompts(prompts: Sequence[Prompt], candidates: int, limits: LimitSettings) -> None:
    """Check the prompts of a request. The generator reads each prompt `candidates` times.

    Raises TooManyItems or InputTooLong.
    """
    check_count("prompt", len(prompts), limits.items)
    single = len(prompts) == 1
    sizes = [
        _check_prompt(prompt, "prompt" if single else f"prompt[{i}]", limits)
        for i, prompt in enumerate(prompts)
    ]
    check_total("prompt", sum(sizes) * candidates, limits.request_chars)


def _check_prompt(prompt: Prompt, path: str, limits: LimitSettings) -> int:
    """Check a prompt, and return its number of characters or token ids.

    A chat counts as one text, because the chat template joins its messages.
    """
    if not isinstance(prompt, Chat):
        unit = "characters" if isinstance(prompt, str) else "token ids"
        return _check_size(len(prompt), unit, path, limits)
    check_count("prompt", len(prompt.messages), limits.items)
    total = 0
    for i, message in enumerate(prompt.messages):
        content = f"{path}[{i}].content"
        total += _check_size(len(message["content"]), "characters", content, limits)
        total += sum(len(message.get(key, "")) for key in UNBOUNDED_KEYS)
        if "tool_calls" in message:
            total += len(msgspec.json.encode(message["tool_calls"]))
    total += sum(
        len(msgspec.json.encode(more)) for more in (prompt.tools, prompt.variables) if more
    )
    return _check_size(total, "characters in total", path, limits)


def _check_size(size: int, unit: str, path: str, limits: LimitSettings) -> int:
    if size > limits.item_chars:
        raise InputTooLong(
            f"`{path}` has {size} {unit}; the maximum is {limits.item_chars}. Shorten it.",
            field=path,
        )
    return size
