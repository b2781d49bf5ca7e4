"""Tokenizes texts for tasks with character positions; splits long texts into windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from deployments.errors import InputTooLong
from deployments.messages import Text, TokenizedItem, TokenOffsets, Truncation, Windowing
from deployments.tokenization.encodings import build_item, open_tokenizer

# Maximum windows per text. With small windows and a large stride, a long text could need a window
# for every token. That is too much work for one request.
MAX_WINDOWS = 1024

TokenWindow = tuple[TokenizedItem, TokenOffsets]


class WindowTokenizer:
    """The tokenizer of one model with offsets. Not thread-safe.

    Tokenization with offsets takes 50 % more time than tokenization to ids alone. Therefore, only
    calls that need offsets use this class.
    """

    def __init__(self, directory: Path, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokenizer = open_tokenizer(directory)

    def windows(
        self, text: Text, index: int, windowing: Windowing, truncation: Truncation
    ) -> tuple[list[TokenWindow], bool]:
        """Return the windows of text `index`, and whether the text was truncated.

        Raises InputTooLong if the text exceeds one window and the request has neither a stride nor
        truncation. With a stride, raises InputTooLong in two cases: the text needs more than
        MAX_WINDOWS windows, or the first segment of a pair leaves less than two tokens of a window.
        The caller adds the field to the error.
        """
        max_tokens = min(windowing.tokens or self._max_tokens, self._max_tokens)
        text, is_truncated = self._truncate_first_segment(text, windowing.first_tokens)
        encoding = self._encode(text)
        if len(encoding.ids) <= max_tokens:
            return [_window(encoding, text, index)], is_truncated
        if windowing.stride is not None:
            return self._slide(text, encoding, index, max_tokens, windowing.stride), is_truncated
        if truncation is Truncation.REFUSE:
            raise InputTooLong(
                f"has {len(encoding.ids)} tokens; the maximum is {max_tokens}. Shorten it, request "
                "truncation or, if the task supports it, set a stride."
            )
        side = "left" if truncation is Truncation.KEEP_END else "right"
        self._tokenizer.enable_truncation(max_tokens, direction=side)
        return [_window(self._encode(text), text, index)], True

    def _slide(
        self, text: Text, whole: Encoding, index: int, max_tokens: int, stride: int
    ) -> list[TokenWindow]:
        pair = not isinstance(text, str)
        windowed_segment = 1 if pair else 0
        tokens = sum(segment == windowed_segment for segment in whole.sequence_ids)
        # Special tokens and the first segment of a pair are part of every window.
        available = max_tokens - (len(whole.ids) - tokens)
        if available < 2:
            raise InputTooLong(
                f"has no space next to its first segment in windows of {max_tokens} tokens"
            )
        stride = min(stride, available // 2)
        count = -(-(tokens - stride) // (available - stride))
        if count > MAX_WINDOWS:
            raise InputTooLong(
                f"has {tokens} tokens and needs {count} windows of {max_tokens} tokens; "
                f"the maximum is {MAX_WINDOWS} windows"
            )
        strategy = "only_second" if pair else "only_first"
        self._tokenizer.enable_truncation(max_tokens, stride=stride, strategy=strategy)
        first = self._encode(text)
        return [_window(encoding, text, index) for encoding in (first, *first.overflowing)]

    def _truncate_first_segment(self, text: Text, max_tokens: int | None) -> tuple[Text, bool]:
        if isinstance(text, str) or max_tokens is None:
            return text, False
        (first,) = self._tokenizer.encode_batch([text[0]], add_special_tokens=False)
        if len(first.ids) <= max_tokens:
            return text, False
        return (text[0][: first.offsets[max_tokens - 1][1]], text[1]), True

    def _encode(self, text: Text) -> Encoding:
        """Encode with the current truncation, then switch it off.

        `encode` would hold the GIL, and so stop the event loop meanwhile.
        """
        try:
            (encoding,) = self._tokenizer.encode_batch([text])
            return encoding
        finally:
            self._tokenizer.no_truncation()


def _window(encoding: Encoding, text: Text, index: int) -> TokenWindow:
    offsets = TokenOffsets(
        text=index,
        offsets=np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2),
        segments=np.array(_numbers(encoding.sequence_ids), dtype=np.int8),
        words=_words(encoding),
    )
    return build_item(encoding, pair=not isinstance(text, str)), offsets


def _words(encoding: Encoding) -> NDArray[np.int32]:
    return np.array(_numbers(encoding.word_ids), dtype=np.int32)


def _numbers(values: list[int | None]) -> list[int]:
    return [-1 if value is None else value for value in values]
