"""How many texts a request may have, and how long they may be before they are even tokenized."""

from __future__ import annotations

from dataclasses import replace

from deployments.errors import InputTooLong, TooManyItems
from deployments.messages import Text, Truncation, characters
from deployments.tasks import TaskInput


def within_characters(parsed: TaskInput, item_chars: int) -> TaskInput:
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
    return replace(parsed, texts=tuple(cut_text(text, kept) for text in parsed.texts))


def longest_segment(text: Text) -> int:
    """Characters of a text; of a pair, those of its longer segment."""
    return len(text) if isinstance(text, str) else max(map(len, text))


def cut_text(text: Text, kept: slice) -> Text:
    """`text[kept]`; each segment of a pair on its own."""
    return text[kept] if isinstance(text, str) else (text[0][kept], text[1][kept])


def within_total(parsed: TaskInput, request_chars: int) -> TaskInput:
    """`parsed`, whose texts are tokenized together in one go while other requests wait.

    A small body can ask for much: a query is read once with every text, a text with every label.
    Raises InputTooLong.
    """
    check_total(parsed.many, sum(map(characters, parsed.texts)), request_chars)
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
