"""Reasoning of thinking models: the text between two marks, such as `<think>` and `</think>`.

A model may think if its chat template names a mark, and both marks are tokens of its vocabulary.
Tokens separate the reasoning from the text, so that a quoted mark of several tokens ends nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Self

from deployments.messages import Token

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class MarkTexts(NamedTuple):
    """What begins the reasoning, and what ends it."""

    open: str
    close: str
    label: str = ""  # text between the first mark and the reasoning


THINK = MarkTexts("<think>", "</think>")  # of Qwen3, DeepSeek-R1 and most others
KNOWN_MARKS = (
    THINK,
    MarkTexts("[THINK]", "[/THINK]"),  # of Magistral
    MarkTexts("<seed:think>", "</seed:think>"),  # of Seed-OSS
    MarkTexts("<|START_THINKING|>", "<|END_THINKING|>"),  # of Command A
    MarkTexts("<|channel>", "<channel|>", label="thought\n"),  # of Gemma 4
)


class ReasoningMarks(NamedTuple):
    """Tokens of the marks of a model."""

    open: int
    close: int
    texts: MarkTexts

    @classmethod
    def find_all(cls, tokenizer: Tokenizer, vocabulary: int) -> tuple[Self, ...]:
        """Return the known marks of which both are tokens and have logits."""
        return tuple(
            cls(first, last, texts)
            for texts in KNOWN_MARKS
            if (first := tokenizer.token_to_id(texts.open)) is not None
            and (last := tokenizer.token_to_id(texts.close)) is not None
            and max(first, last) < vocabulary
        )


def find_named_marks(template: str) -> tuple[MarkTexts, ...]:
    """Return the known marks of which a chat template names at least one."""
    return tuple(each for each in KNOWN_MARKS if each.open in template or each.close in template)


class _Phase(Enum):
    BEFORE = auto()  # the answer is blank so far: the first mark may follow
    INSIDE = auto()
    AFTER = auto()  # the second mark was the last token that is not blank
    OVER = auto()  # the answer has begun


class AnswerSplitter(ABC):
    """Splitter of the tokens of one answer into reasoning and text."""

    def __init__(self) -> None:
        self.token_count = 0  # tokens of the reasoning so far, with its marks

    @property
    @abstractmethod
    def mark_ids(self) -> Sequence[int]:
        """Tokens that the text of an answer omits."""

    @property
    @abstractmethod
    def is_inside(self) -> bool:
        """Whether the next token belongs to the reasoning, unless it ends the reasoning."""

    @property
    def openers(self) -> Sequence[int]:
        """Tokens that begin the reasoning if the next token is one of them."""
        return ()

    @property
    def forced_token(self) -> int | None:
        """The next token of the answer, or None if the model may choose."""
        return None

    @abstractmethod
    def is_closed_by(self, token: int) -> bool:
        """Whether `token` ends the reasoning."""

    @abstractmethod
    def push(self, token: Token, *, is_blank: bool) -> list[Token]:
        """Return the next tokens of the reasoning or the text, without the marks.

        Tokens may be held back until it is known what they belong to. `is_blank`: `token` adds at
        most white space, and no part of a character.
        """

    def finish(self, token: Token) -> list[Token]:
        """Return the last tokens of an answer that the end token `token` ends."""
        return [*self.flush(), token]

    @abstractmethod
    def flush(self) -> list[Token]:
        """Return the tokens held back, at the end of an answer."""

    def _hide(self, token: Token, mark: str = "") -> Token:
        """Return `token` as one of the reasoning, whose log-probabilities no client receives."""
        self.token_count += 1
        text = token.text.removesuffix(mark)
        return Token(token.id, text, special=token.special, reasoning=True)


class ReasoningSplitter(AnswerSplitter):
    """Splitter by two marks: the text between them is the reasoning. Later marks are text."""

    def __init__(self, marks: ReasoningMarks, *, is_inside: bool, trims_text: bool) -> None:
        """Start inside the reasoning, or where it may begin.

        With `trims_text`, the white space around the reasoning belongs to the reasoning, otherwise
        to the text. Most models write an empty line after it, some a line end before it.
        """
        super().__init__()
        self.marks = marks
        self._phase = _Phase.INSIDE if is_inside else _Phase.BEFORE
        self._trims_text = trims_text
        self._label = marks.texts.label  # characters of it that may follow
        self._held: list[Token] = []  # blank tokens of BEFORE

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
    def mark_ids(self) -> Sequence[int]:
        return (self.marks.open, self.marks.close)

    @property
    def is_inside(self) -> bool:
        return self._phase is _Phase.INSIDE

    @property
    def openers(self) -> Sequence[int]:
        return (self.marks.open,) if self._phase is _Phase.BEFORE else ()

    def is_closed_by(self, token: int) -> bool:
        return self.is_inside and token == self.marks.close

    def push(self, token: Token, *, is_blank: bool) -> list[Token]:
        """Return the next tokens; blank ones are held back until reasoning or text begins."""
        match self._phase:
            case _Phase.BEFORE if token.id == self.marks.open:
                self._phase = _Phase.INSIDE
                blanks = self.flush() if self._trims_text else []
                return [*map(self._hide, blanks), self._hide(token, self.marks.texts.open)]
            case _Phase.BEFORE if is_blank:
                self._held.append(token)
                return []
            case _Phase.INSIDE if self.is_closed_by(token.id):
                self._phase = _Phase.AFTER if self._trims_text else _Phase.OVER
                return [self._hide(token, self.marks.texts.close)]
            case _Phase.INSIDE:
                return [self._hide(self._skip_label(token))]
            case _Phase.AFTER if is_blank:
                return [self._hide(token)]
            case _Phase.AFTER:
                token = _trim_start(token)
        self._phase = _Phase.OVER
        return [*self.flush(), token]

    def _skip_label(self, token: Token) -> Token:
        """Return `token` without the label, or with its first characters if they were no label."""
        label, text = self._label, token.text
        if not label:
            return token
        if label.startswith(text):
            self._label = label[len(text) :]
            return token._replace(text="")
        self._label = ""
        if text.startswith(label):
            return token._replace(text=text.removeprefix(label))
        return token._replace(text=self.marks.texts.label.removesuffix(label) + text)

    def flush(self) -> list[Token]:
        held, self._held = self._held, []
        return held


def _trim_start(token: Token) -> Token:
    text = token.text.lstrip()
    alternatives = tuple(
        each._replace(text=text) if each.id == token.id else each for each in token.alternatives
    )
    return token._replace(text=text, alternatives=alternatives)
