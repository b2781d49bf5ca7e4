"""Answers in Harmony, the format of GPT-OSS: messages in channels, each after a header.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes!<|return|>

The channel `analysis` is the reasoning. `final` is the text of the answer, and so is `commentary`,
unless its header names a function as the recipient. Such a message is the arguments of a call. It
becomes text in the form in which other models write calls, so that the APIs parse one form only.

Source of the format: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Self

from tokenizers import Tokenizer

from deployments.generation.reasoning import AnswerSplitter
from deployments.messages import CALL_CLOSE, CALL_OPEN, Token

_MARKS = START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_RECIPIENT = re.compile(r"\bto=functions\.([\w-]+)")
_OTHER_RECIPIENT = re.compile(r"\bto=")
_REASONING_CHANNEL = "analysis"
_MAX_HEADER_TOKENS = 64  # more are no header; function names have up to 64 characters
_ROLE = "assistant"
_BEFORE_CHANNEL = re.compile(
    rf"(?:{_ROLE})?\s*(?:t|to|to=.*)?"
)  # a header without a channel so far


class HarmonyTokens(NamedTuple):
    """Tokens of the marks of a model."""

    start: int
    channel: int
    message: int
    end: int

    @classmethod
    def find(cls, tokenizer: Tokenizer, vocabulary: int) -> Self | None:
        """Return the marks if all of them are tokens that have logits."""
        found = [
            token
            for mark in _MARKS
            if (token := tokenizer.token_to_id(mark)) is not None and token < vocabulary
        ]
        return cls(*found) if len(found) == len(cls._fields) else None


def is_harmony(template: str) -> bool:
    """Return whether a chat template writes this format."""
    return all(mark in template for mark in (START, CHANNEL, MESSAGE))


class _HarmonyPart(Enum):
    HEADER = auto()
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class HarmonySplitter(AnswerSplitter):
    """Splitter of the tokens of one answer into reasoning, text and calls as text.

    Headers count as reasoning. A text without a header is text.
    """

    def __init__(
        self, tokens: HarmonyTokens, tokenizer: Tokenizer, *, is_constrained: bool
    ) -> None:
        """Start in the header of a message.

        With `is_constrained`, a grammar describes the text: only the channel `final` is text.
        """
        super().__init__()
        self._tokens, self._tokenizer, self._is_constrained = tokens, tokenizer, is_constrained
        self._part = _HarmonyPart.HEADER
        self._prompt_header: list[int] = []  # tokens of the header that are part of the prompt
        self._header: list[Token] = []  # tokens held back
        self._has_text = False  # whether an earlier message is text
        self._has_arguments = False

    @classmethod
    def after_prompt(
        cls,
        prompt: Sequence[int],
        tokens: HarmonyTokens,
        tokenizer: Tokenizer,
        *,
        is_constrained: bool,
    ) -> Self | None:
        """Start where a prompt ends. Return None if no message of the prompt is open."""
        begun = next((n for n, token in enumerate(reversed(prompt)) if token == tokens.start), None)
        if begun is None:
            return None
        splitter = cls(tokens, tokenizer, is_constrained=is_constrained)
        for token in prompt[len(prompt) - begun :]:
            splitter.push(Token(token, ""), is_blank=False)
        splitter._prompt_header = [token.id for token in splitter._header]
        splitter._header = []
        splitter.token_count = 0
        return splitter

    @property
    def mark_ids(self) -> Sequence[int]:
        return self._tokens

    @property
    def is_inside(self) -> bool:
        return self._part in (_HarmonyPart.HEADER, _HarmonyPart.REASONING)

    @property
    def openers(self) -> Sequence[int]:
        return ()  # while a header may follow, no grammar applies

    def is_closed_by(self, token: int) -> bool:
        return self.is_inside and token in self._tokens

    def push(self, token: Token, *, is_blank: bool) -> list[Token]:
        match self._part:
            case _ if token.id in (self._tokens.start, self._tokens.end):
                return self._end_message(token)
            case _HarmonyPart.HEADER if token.id == self._tokens.message:
                return self._begin_message(token)
            case _HarmonyPart.HEADER:
                self._header.append(token)
                return [] if self._may_be_header else self._release_header()
            case _HarmonyPart.REASONING:
                return [self._hide(token)]
            case _HarmonyPart.CALL:
                self._has_arguments = self._has_arguments or not is_blank
        return [token]

    def finish(self, token: Token) -> list[Token]:
        return [*self.flush(), token._replace(text=self._close_call())]

    def flush(self) -> list[Token]:
        if self._may_be_header:
            return self._hide_header()
        return self._release_header()

    def _end_message(self, token: Token) -> list[Token]:
        """End a message, and begin the header of the next one."""
        released, closing = self.flush(), self._close_call()
        self._part = _HarmonyPart.HEADER
        return [*released, self._replace_mark(token, closing)]

    def _begin_message(self, token: Token) -> list[Token]:
        header = self._read_header()
        hidden = self._hide_header()
        self._part = self._classify(header)
        self._has_arguments = False
        opening = ""
        if self._part is _HarmonyPart.CALL:
            name = json.dumps(_RECIPIENT.findall(header)[-1])
            opening = f'{CALL_OPEN}{{"name": {name}, "arguments": '
        elif self._part is _HarmonyPart.TEXT and self._has_text:
            opening = "\n\n"
        self._has_text = self._has_text or self._part is not _HarmonyPart.REASONING
        return [*hidden, self._replace_mark(token, opening)]

    def _classify(self, header: str) -> _HarmonyPart:
        channel = header.partition(CHANNEL)[2].split()
        is_final = channel[:1] == ["final"]
        if self._is_constrained and not is_final:
            return _HarmonyPart.REASONING
        if _RECIPIENT.search(header):
            return _HarmonyPart.CALL
        is_other = channel[:1] == [_REASONING_CHANNEL] or _OTHER_RECIPIENT.search(header)
        return _HarmonyPart.REASONING if is_other else _HarmonyPart.TEXT

    def _close_call(self) -> str:
        """End an open call; return the text that ends it."""
        if self._part is not _HarmonyPart.CALL:
            return ""
        self._part = _HarmonyPart.HEADER
        return f"{'' if self._has_arguments else '{}'}}}{CALL_CLOSE}"

    def _replace_mark(self, token: Token, text: str) -> Token:
        """Return a mark as `text`, or hide it if that is empty."""
        if text:
            return token._replace(text=text)
        return self._hide(token, _MARKS[self._tokens.index(token.id)])

    @property
    def _may_be_header(self) -> bool:
        """Whether the tokens held back are the start of a header, not text without a header."""
        if self._is_constrained or not self._header:
            return True
        if len(self._header) > _MAX_HEADER_TOKENS:
            return False
        header = self._read_header().lstrip()
        is_role = _ROLE.startswith(header)
        return is_role or CHANNEL in header or _BEFORE_CHANNEL.fullmatch(header) is not None

    def _read_header(self) -> str:
        ids = [*self._prompt_header, *(token.id for token in self._header)]
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _hide_header(self) -> list[Token]:
        held, self._header, self._prompt_header = self._header, [], []
        return [self._hide(token._replace(text="")) for token in held]

    def _release_header(self) -> list[Token]:
        """Return the tokens held back as text without a header."""
        held, self._header, self._prompt_header = self._header, [], []
        if held:
            self._part, self._has_text = _HarmonyPart.TEXT, True
        return held
