"""Answers in Harmony, the format of GPT-OSS: messages in channels.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes!<|return|>

The channel `analysis` is the reasoning. `final` is the text of the answer, and so is `commentary`,
unless the header of the message names a recipient. The message to a function is the arguments of a
call. It becomes text in the form in which other models write calls, so that the APIs parse one
form only. Messages to other recipients, such as `python`, are reasoning.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Self

from deployments.generation.harmony import BETWEEN, CHANNEL, MARKS, TURN_ENDS
from deployments.generation.reasoning import AnswerSplitter
from deployments.messages import CALL_CLOSE, CALL_OPEN, Token

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ROLE, _ANALYSIS, _FINAL = "assistant", "analysis", "final"
_CHANNELS = (_ANALYSIS, "commentary", _FINAL)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."  # namespace of the functions that a request offers
_NO_RECIPIENTS = (_ROLE, "user", "all")
_MAX_HEADER_TOKENS = 64


class HarmonyTokens(NamedTuple):
    """Tokens of a model."""

    start: int
    channel: int
    message: int
    ends: tuple[int, ...]  # END, and those of TURN_ENDS that the model has

    @classmethod
    def find(cls, tokenizer: Tokenizer, vocabulary: int) -> Self | None:
        """Return the tokens if those of all four marks have logits."""

        def find(mark: str) -> int | None:
            token: int | None = tokenizer.token_to_id(mark)
            return None if token is None or token >= vocabulary else token

        start, channel, message, end = map(find, MARKS)
        if start is None or channel is None or message is None or end is None:
            return None
        others = (token for token in map(find, TURN_ENDS) if token is not None)
        return cls(start, channel, message, (end, *others))


class _HarmonyPart(Enum):
    HEADER = auto()
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class HarmonySplitter(AnswerSplitter):
    """Splitter of the tokens of one answer into reasoning, text, and calls as text.

    Headers count as reasoning. An answer without a header is text. With `is_constrained`, a grammar
    describes the text: it is one message in the channel `final`, before which the model may write
    one of reasoning.
    """

    def __init__(
        self,
        tokens: HarmonyTokens,
        tokenizer: Tokenizer,
        functions: Sequence[str] = (),
        *,
        is_constrained: bool = False,
    ) -> None:
        """Start in the header of a message. The request offers the functions named `functions`."""
        super().__init__()
        self._tokens, self._tokenizer = tokens, tokenizer
        self._functions, self._is_constrained = functions, is_constrained
        self._part = _HarmonyPart.HEADER
        self._known_header: list[int] = []  # tokens of the header that are not held back
        self._header: list[Token] = []  # tokens held back
        self._is_first = True  # whether no message has begun so far
        self._parts: set[_HarmonyPart] = set()  # kinds of the messages so far
        self._has_arguments = False
        self._forced: deque[int] = deque()

    @classmethod
    def after_prompt(
        cls,
        prompt: Sequence[int],
        tokens: HarmonyTokens,
        tokenizer: Tokenizer,
        functions: Sequence[str] = (),
        *,
        is_constrained: bool = False,
    ) -> Self | None:
        """Start where a prompt ends. Return None if the prompt has no message."""
        begun = next((n for n, token in enumerate(reversed(prompt)) if token == tokens.start), None)
        if begun is None:
            return None
        splitter = cls(tokens, tokenizer, functions, is_constrained=is_constrained)
        splitter._replay(prompt[len(prompt) - begun :])
        return splitter

    def _replay(self, prompt: Sequence[int]) -> None:
        """Follow the last message of a prompt, without START."""
        for token in prompt:
            self.push(Token(token, ""), is_blank=False)
            self._forced.clear()
        self._known_header = [token.id for token in self._header]
        self._header, self._parts, self.token_count = [], set(), 0
        if self._part is _HarmonyPart.CALL:  # the opening of the call is not part of the answer
            self._part = _HarmonyPart.TEXT
        if not self._is_constrained or self._part is not _HarmonyPart.HEADER:
            return
        if not self._is_first:
            self._force_final([self._tokens.start, *self._spell(_ROLE)])
        elif self._tokens.channel not in self._known_header:
            self._forced.append(self._tokens.channel)

    @property
    def mark_ids(self) -> Sequence[int]:
        return (self._tokens.start, self._tokens.channel, self._tokens.message, *self._tokens.ends)

    @property
    def is_inside(self) -> bool:
        is_header = self._part is _HarmonyPart.HEADER
        return self._part is _HarmonyPart.REASONING or (is_header and self._is_constrained)

    @property
    def forced_token(self) -> int | None:
        return self._forced[0] if self._forced else None

    def is_closed_by(self, token: int) -> bool:
        return self._part is _HarmonyPart.REASONING and token in self.mark_ids

    def push(self, token: Token, *, is_blank: bool) -> list[Token]:
        if self._forced:
            self._forced.popleft()
        if token.id == self._tokens.start or token.id in self._tokens.ends:
            return self._end_message(token)
        if self._part is not _HarmonyPart.HEADER:
            if token.id == self._tokens.channel:  # the model forgot to end a message
                ended = self._end_message(token)
                self._known_header = [token.id]
                return ended
            self._has_arguments = self._has_arguments or not is_blank
            return [self._hide(token) if self._part is _HarmonyPart.REASONING else token]
        if token.id == self._tokens.message:
            return self._begin_message(token)
        return self._extend_header(token)

    def finish(self, token: Token) -> list[Token]:
        released, closing = self.flush(), self._close_call()
        return [*released, self._replace_mark(token, closing) if closing else token]

    def flush(self) -> list[Token]:
        """Return the tokens held back: text if they began no header, else reasoning."""
        header = self._read_header()
        is_begun = CHANNEL in header or _read_recipient(header).startswith(_FUNCTIONS)
        is_text = self._is_first and not self._is_constrained and not is_begun
        return self._release_header() if is_text else self._hide_header()

    def _extend_header(self, token: Token) -> list[Token]:
        self._header.append(token)
        if self._is_constrained:
            if len(self._header) >= _MAX_HEADER_TOKENS and not self._forced:
                self._forced.append(self._tokens.message)
            return []
        return [] if self._may_be_header else self._release_header()

    def _end_message(self, token: Token) -> list[Token]:
        """End a message, and begin the header of the next one."""
        released, closing = self._hide_header(), self._close_call()
        if self._is_constrained and not self._forced:
            role = [self._tokens.start, *self._spell(_ROLE)]
            is_start = token.id == self._tokens.start
            self._force_final(role[1:] if is_start else role)
        self._part, self._is_first = _HarmonyPart.HEADER, False
        return [*released, self._replace_mark(token, closing)]

    def _begin_message(self, token: Token) -> list[Token]:
        header = self._read_header()
        hidden = self._hide_header()
        self._part, self._is_first, self._has_arguments = self._classify(header), False, False
        text = BETWEEN if self._part in self._parts else ""
        self._parts.add(self._part)
        if self._part is _HarmonyPart.REASONING:
            if self._is_constrained and _read_channel(header) != _ANALYSIS:
                end, role = self._tokens.ends[0], self._spell(_ROLE)
                self._force_final([end, self._tokens.start, *role])
            return [*hidden, self._hide(token._replace(text=text))]
        if self._part is _HarmonyPart.CALL:
            name = json.dumps(_read_recipient(header).removeprefix(_FUNCTIONS))
            text = f'{CALL_OPEN}{{"name": {name}, "arguments": '
        return [*hidden, self._replace_mark(token, text)]

    def _classify(self, header: str) -> _HarmonyPart:
        channel, recipient = _read_channel(header), _read_recipient(header)
        role = header.strip().partition("<")[0].split()[:1]
        if self._is_constrained:
            return _HarmonyPart.TEXT if channel == _FINAL else _HarmonyPart.REASONING
        if role and role[0] not in (_ROLE, *_CHANNELS) and not role[0].startswith("to="):
            return _HarmonyPart.REASONING  # an invented message of the user or of a tool
        if recipient.removeprefix(_FUNCTIONS) in self._functions:
            return _HarmonyPart.CALL
        is_other = recipient and recipient not in _NO_RECIPIENTS
        return _HarmonyPart.REASONING if is_other or channel == _ANALYSIS else _HarmonyPart.TEXT

    def _close_call(self) -> str:
        """Return the text that ends the call if a message is one. The message ends."""
        was_call = self._part is _HarmonyPart.CALL
        self._part = _HarmonyPart.HEADER
        return f"{'' if self._has_arguments else '{}'}}}{CALL_CLOSE}" if was_call else ""

    def _force_final(self, before: Sequence[int]) -> None:
        """Force tokens after which the grammar applies: `before`, then a header."""
        tokens = self._tokens
        header = tokens.channel, *self._spell(_FINAL), tokens.message
        self._forced = deque(chain(before, header))

    def _spell(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @property
    def _may_be_header(self) -> bool:
        """Whether the tokens held back may be the start of a header.

        The first header names a channel, or a recipient before it. Otherwise the answer has no
        header. Later ones follow the end of a message, after which there is no other text.
        """
        header = self._read_header().strip()
        after_role = header.removeprefix(_ROLE).lstrip()
        is_begun = (
            not self._is_first
            or CHANNEL in header
            or _ROLE.startswith(header)
            or after_role.startswith("to=")
            or any(word.startswith(after_role) for word in ("to=", *_CHANNELS))
        )
        return is_begun and len(self._header) <= _MAX_HEADER_TOKENS

    def _read_header(self) -> str:
        ids = [*self._known_header, *(token.id for token in self._header)]
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def _hide_header(self) -> list[Token]:
        held, self._header, self._known_header = self._header, [], []
        return [self._hide(token._replace(text="")) for token in held]

    def _release_header(self) -> list[Token]:
        """Return the tokens held back as text."""
        held, self._header, self._known_header = self._header, [], []
        if held:
            self._part, self._is_first = _HarmonyPart.TEXT, False
            self._parts.add(self._part)
        return held

    def _replace_mark(self, token: Token, text: str) -> Token:
        """Return a mark as `text`, or hide it if that is empty."""
        shown = token._replace(text=text, special=True)
        return shown if text else self._hide(shown)


def _read_channel(header: str) -> str:
    """Return the channel, also of a header whose channel lacks its mark; "" without a channel."""
    named = _CHANNEL_NAME.findall(header)
    words = named or [word for word in header.split() if word in _CHANNELS]
    return words[-1] if words else ""


def _read_recipient(header: str) -> str:
    found = _RECIPIENT.findall(header)
    return found[-1] if found else ""
