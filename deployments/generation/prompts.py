"""Prompts as token ids, whatever they were given as."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from deployments.encoding.tokenizer_file import open_tokenizer
from deployments.errors import EmptyInput, InvalidField, UnknownToken
from deployments.generation.chat_template import ChatTemplate
from deployments.generation.messages import Chat, Prompt
from deployments.manifest import CHAT_TEMPLATE_NAME, Decoding


class PromptReader:
    """The tokenizer and the chat template of one model. Not thread-safe."""

    def __init__(self, directory: Path, decoding: Decoding) -> None:
        """Of the artifact in `directory`. Raises ArtifactError."""
        self._directory = directory
        self._decoding = decoding
        self._tokenizer = open_tokenizer(directory)

    def ids(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt, at least one.

        Text gets the special tokens that the tokenizer adds, token ids get none, and a conversation
        those that its template writes. Special tokens written in a text are read as such. Raises
        EmptyInput, UnknownToken, InputTooLong, or InvalidField with the template's reason.
        """
        if isinstance(prompt, Chat):
            return self._ids_of_chat(prompt)
        ids = self._ids_of_text(prompt) if isinstance(prompt, str) else self._checked(prompt)
        if not ids:
            raise EmptyInput("`prompt` has no tokens", field="prompt")
        return ids

    def _ids_of_text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids if text else []
        return ids

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
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
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
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
