"""Reasoning of thinking models: the text between `<think>` and `</think>` before an answer.

A model may think if its chat template names a mark, and both marks are tokens of its vocabulary.
Tokens separate the reasoning from the text, so that a quoted mark of several tokens ends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Self

from tokenizers import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


class ReasoningMarks(NamedTuple):
    """Token ids of OPEN and CLOSE."""

    open: int
    close: int

    @classmethod
    def find(cls, tokenizer: Tokenizer, vocabulary: int) -> Self | None:
        """Return the marks; None if one of them is no token or has no logit."""
        first, last = tokenizer.token_to_id(OPEN), tokenizer.token_to_id(CLOSE)
        if first is None or last is None or max(first, last) >= vocabulary:
            return None
        return cls(first, last)


class _Phase(Enum):
    BEFORE = auto()  # the answer is blank so far: OPEN may follow
    INSIDE = auto()
    AFTER = auto()  # CLOSE was the last token that is not blank
    OVER = auto()  # the answer has begun


class ReasoningSplitter:
    """Splitter of the tokens of one answer into reasoning and text. Later marks are text."""

    def __init__(self, marks: ReasoningMarks, *, is_inside: bool, trims_text: bool) -> None:
        """Start inside the reasoning, or where it may begin.

        With `trims_text`, the white space between the reasoning and the text belongs to the
        reasoning. Most models write an empty line there.
        """
        self.marks = marks
        self.token_count = 0  # tokens of the reasoning so far, with its marks
        self._phase = _Phase.INSIDE if is_inside else _Phase.BEFORE
        self._trims_text = trims_text

    @classmethod
    def after_prompt(
        cls,
        prompt: Sequence[int],
        marks: ReasoningMarks,
        tokenizer: Tokenizer,
        *,
        trims_text: bool,
    ) -> Self | None:
        """Start where a prompt ends. Return None if it has closed the reasoning."""

        def is_blank(token: int) -> bool:
            return not tokenizer.decode([token], skip_special_tokens=False).strip()

        last = next((token for token in reversed(prompt) if not is_blank(token)), None)
        if last == marks.close:
            return None
        return cls(marks, is_inside=last == marks.open, trims_text=trims_text)

    @property
    def is_inside(self) -> bool:
        return self._phase is _Phase.INSIDE

    @property
    def may_open(self) -> bool:
        """Whether the reasoning begins if the next token is OPEN."""
        return self._phase is _Phase.BEFORE

    def push(self, token: int, added: str) -> tuple[bool, str]:
        """Return whether `token` belongs to the reasoning, and its text without a mark.

        `added` is the text that the token adds to the whole answer.
        """
        is_reasoning, text = self._split(token, added)
        self.token_count += is_reasoning
        return is_reasoning, text

    def _split(self, token: int, added: str) -> tuple[bool, str]:
        if self._phase is _Phase.BEFORE and token == self.marks.open:
            self._phase = _Phase.INSIDE
            return True, added.removesuffix(OPEN)
        if self._phase is _Phase.INSIDE:
            if token == self.marks.close:
                self._phase = _Phase.AFTER if self._trims_text else _Phase.OVER
            return True, added.removesuffix(CLOSE) if token == self.marks.close else added
        if self._phase is _Phase.AFTER:
            if added.isspace():
                return True, added
            added = added.lstrip()
        if not added.isspace():
            self._phase = _Phase.OVER
        return False, added
