"""Prompts as token ids, whatever they were given as."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from deployments.decoding import Decoding
from deployments.encoding.cutting import cut_item
from deployments.encoding.tokenizer_file import open_tokenizer
from deployments.errors import EmptyInput, InvalidField, UnknownToken
from deployments.generation.chat_template import ChatTemplate
from deployments.generation.messages import Chat, Prompt
from deployments.manifest import CHAT_TEMPLATE_NAME
from deployments.messages import Truncation


class Cut(NamedTuple):
    """What is kept of a prompt of too many tokens."""

    most: int  # tokens
    keep: Truncation  # REFUSE: all of it, for others to refuse


class PromptReader:
    """The tokenizer and the chat template of one model. Not thread-safe."""

    def __init__(self, directory: Path, decoding: Decoding) -> None:
        """Of the artifact in `directory`. Raises ArtifactError."""
        self._directory = directory
        self._decoding = decoding
        self.tokenizer = open_tokenizer(directory)

    def ids(self, prompt: Prompt, cut: Cut | None = None) -> list[int]:
        """The tokens of a prompt, at least one.

        Text gets the special tokens that the tokenizer adds, also where it is cut; token ids get
        none, and a conversation those that its template writes. Special tokens written in a text
        are read as such. Raises EmptyInput, UnknownToken, InputTooLong, or InvalidField with the
        template's reason.
        """
        if isinstance(prompt, Chat):
            return _kept(self._ids_of_chat(prompt), cut)
        if isinstance(prompt, str):
            ids = self._ids_of_text(prompt, cut)
        else:
            ids = _kept(self._checked(prompt), cut)
        if not ids:
            raise EmptyInput("`prompt` has no tokens", field="prompt")
        return ids

    def _ids_of_text(self, text: str, cut: Cut | None) -> list[int]:
        if not text:
            return []
        encoding = self.tokenizer.encode(text)
        ids: list[int] = encoding.ids
        if cut is None or cut.keep is Truncation.REFUSE or len(ids) <= cut.most:
            return ids
        kept: list[int] = cut_item(encoding, cut.most, cut.keep).ids.tolist()
        return kept

    def _checked(self, given: tuple[int, ...]) -> list[int]:
        for token in (min(given, default=0), max(given, default=0)):
            if not 0 <= token < self._vocabulary_end:
                raise UnknownToken(
                    f"`prompt` has the token id {token}, the vocabulary goes from 0 to "
                    f"{self._vocabulary_end - 1}",
                    field="prompt",
                )
        return list(given)

    def _ids_of_chat(self, chat: Chat) -> list[int]:
        text = self._template.render(chat) if chat.messages else ""
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError as exc:  # half a character, which templates can cut out of a text
            raise InvalidField(
                "`messages` make a prompt that is no text in UTF-8", field="messages"
            ) from exc
        if not ids:
            raise EmptyInput("`messages` have no tokens", field="messages")
        return ids

    @cached_property
    def _template(self) -> ChatTemplate:
        try:
            source = (self._directory / CHAT_TEMPLATE_NAME).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise InvalidField(
                "this model has no chat template; send a `prompt` to the completions route instead",
                field="messages",
            ) from None
        return ChatTemplate(source, self._decoding.special_tokens)

    @cached_property
    def _vocabulary_end(self) -> int:
        # Vocabularies of the wild have gaps, so their count is not where they end.
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _kept(ids: list[int], cut: Cut | None) -> list[int]:
    """What is left of tokens among which none is special to the tokenizer."""
    if cut is None or cut.keep is Truncation.REFUSE:
        return ids
    return ids[: cut.most] if cut.keep is Truncation.KEEP_START else ids[-cut.most :]
