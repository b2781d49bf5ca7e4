"""Texts of tasks that answer in characters: items with layouts, long texts in windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from deployments.errors import InputTooLong
from deployments.messages import (
    Text,
    TokenizedItem,
    TokenOffsets,
    Truncation,
    Windowing,
)
from deployments.tokenization.encodings import build_item, open_tokenizer

# Of one text. A window per two tokens of a long text would be more work than a request may ask for.
MAX_WINDOWS = 1024

Window = tuple[TokenizedItem, TokenOffsets]


class WindowTokenizer:
    """One model's tokenizer with offsets, which cost half as much again as ids alone.

    Not thread-safe.
    """

    def __init__(self, directory: Path, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokenizer = open_tokenizer(directory)

    def windows(
        self, text: Text, index: int, windowing: Windowing, truncation: Truncation
    ) -> tuple[list[Window], bool]:
        """The windows of text `index`, and whether some of it was cut off.

        Raises InputTooLong, without a field, when the text needs more than one window and neither
        a stride nor truncation was asked for, or more than MAX_WINDOWS of them.
        """
        most = min(windowing.tokens or self._max_tokens, self._max_tokens)
        text, cut = self._truncate_first_segment(text, windowing.first_tokens)
        encoding = self._encode(text)
        if len(encoding.ids) <= most:
            return [_window(encoding, text, index)], cut
        if windowing.stride is not None:
            return self._strided(text, encoding, index, most, windowing.stride), cut
        if truncation is Truncation.REFUSE:
            raise InputTooLong(
                f"has {len(encoding.ids)} tokens, the model reads at most {most}; shorten it, ask "
                "for truncation or, where the task has it, set a stride"
            )
        side = "left" if truncation is Truncation.KEEP_END else "right"
        self._tokenizer.enable_truncation(most, direction=side)
        return [_window(self._encode(text), text, index)], True

    def _strided(
        self, text: Text, whole: Encoding, index: int, most: int, stride: int
    ) -> list[Window]:
        pair = not isinstance(text, str)
        windowed_segment = 1 if pair else 0
        tokens = sum(segment == windowed_segment for segment in whole.sequence_ids)
        room = most - (len(whole.ids) - tokens)  # what the special tokens and the question leave
        if room < 2:
            raise InputTooLong(f"finds no room beside its first part in windows of {most} tokens")
        stride = min(stride, room // 2)
        count = -(-(tokens - stride) // (room - stride))
        if count > MAX_WINDOWS:
            raise InputTooLong(
                f"has {tokens} tokens, which make {count} windows of {most}; "
                f"at most {MAX_WINDOWS} are read"
            )
        strategy = "only_second" if pair else "only_first"
        self._tokenizer.enable_truncation(most, stride=stride, strategy=strategy)
        first = self._encode(text)
        return [_window(encoding, text, index) for encoding in (first, *first.overflowing)]

    def _truncate_first_segment(self, text: Text, most: int | None) -> tuple[Text, bool]:
        if isinstance(text, str) or most is None:
            return text, False
        words = self._tokenizer.encode(text[0], add_special_tokens=False)
        if len(words.ids) <= most:
            return text, False
        return (text[0][: words.offsets[most - 1][1]], text[1]), True

    def _encode(self, text: Text) -> Encoding:
        """With the truncation that is set, which is taken back."""
        try:
            return self._tokenizer.encode(*((text,) if isinstance(text, str) else text))
        finally:
            self._tokenizer.no_truncation()


def _window(encoding: Encoding, text: Text, index: int) -> Window:
    layout = TokenOffsets(
        text=index,
        offsets=np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2),
        segments=np.array(_numbers(encoding.sequence_ids), dtype=np.int8),
        words=_words(encoding),
    )
    return build_item(encoding, pair=not isinstance(text, str)), layout


def _words(encoding: Encoding) -> NDArray[np.int32]:
    return np.array(_numbers(encoding.word_ids), dtype=np.int32)


def _numbers(values: list[int | None]) -> list[int]:
    return [-1 if value is None else value for value in values]
