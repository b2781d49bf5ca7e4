"""Slices of calls, about 20 ms each. Between slices, the tokenizer serves other calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from deployments.errors import ServeError
from deployments.messages import Call, count_characters
from deployments.tokenization.tokenizer import TokenizedTexts, check_windows

S = TypeVar("S", bound=Sequence[Any])

# A slice ends with the text at which it reaches this many characters, which take about 20 ms. Texts
# are not divided.
SLICE_CHARACTERS = 20_000


class CallPart(NamedTuple):
    """Consecutive texts of one call, as a smaller call."""

    call_index: int
    first_text: int
    call: Call


def cut_calls(calls: Sequence[Call]) -> Iterator[list[CallPart]]:
    """Yield slices: parts of one or several calls, in order."""
    parts: list[CallPart] = []
    size = 0
    for index, call in enumerate(calls):
        start, last = 0, len(call.texts)
        for end, text in enumerate(call.texts, 1):
            size += count_characters(text)
            is_full = size >= SLICE_CHARACTERS
            if is_full or end == last:
                parts.append(CallPart(index, start, _take_texts(call, start, end)))
                start = end
            if is_full:
                yield parts
                parts, size = [], 0
    if parts:
        yield parts


def cut_sequences(sequences: Sequence[S]) -> Iterator[Sequence[S]]:
    """Yield slices of texts, or of sequences of token ids."""
    start = size = 0
    for end, sequence in enumerate(sequences, 1):
        size += len(sequence)
        if size >= SLICE_CHARACTERS or end == len(sequences):
            yield sequences[start:end]
            start, size = end, 0


class CallMerger:
    """Merger of the outcomes of all parts of one call.

    After the first error, the call needs no further parts.
    """

    def __init__(self, call: Call) -> None:
        self.error: ServeError | None = None
        self._call = call
        self._parts: list[tuple[CallPart, TokenizedTexts]] = []
        self._items = 0

    def add(self, part: CallPart, outcome: TokenizedTexts | ServeError) -> None:
        """Add the next outcome. More than MAX_CALL_WINDOWS windows (tokenizer.py) are an error."""
        if isinstance(outcome, ServeError):
            self.error = outcome
            return
        self._parts.append((part, outcome))
        self._items += len(outcome.items)
        if self._call.windowing is not None:
            try:
                check_windows(self._items, part.call.fields[-1])
            except ServeError as too_many:
                self.error = too_many

    def merge(self) -> TokenizedTexts | ServeError:
        if self.error is not None:
            return self.error
        if len(self._parts) == 1:
            return self._parts[0][1]
        items = [item for _, texts in self._parts for item in texts.items]
        offsets = tuple(
            one._replace(text=part.first_text + one.text)
            for part, texts in self._parts
            for one in texts.token_offsets
        )
        truncated = sum(texts.truncated for _, texts in self._parts)
        return TokenizedTexts(items, truncated, offsets)


def _take_texts(call: Call, start: int, end: int) -> Call:
    if (start, end) == (0, len(call.texts)):
        return call
    return call._replace(texts=call.texts[start:end], fields=call.fields[start:end])
