"""Calls that use only the tokenizer: tokens of texts, and texts of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.artifacts.manifest import ArtifactManifest
from deployments.config import LimitSettings
from deployments.deadlines import enforce_deadline
from deployments.errors import InputTooLong, UnknownToken
from deployments.messages import DecodeRequest, TextTokens, TokenizeRequest
from deployments.tasks.embedding import add_prompt
from deployments.transports.base import TokenizerClient

LATE = "the tokenizer exceeded the deadline of the request"


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The text that the tokenizer received, and its tokens."""

    text: str
    tokens: TextTokens


class TokenizationService:
    """Service that calls the tokenizer, with size limits and the deadline of the request."""

    def __init__(self, client: TokenizerClient) -> None:
        self._client = client

    def read_texts(
        self, inputs: str | Sequence[str], parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> tuple[str, ...]:
        """Prepend a prompt of the model, such as `query: `, to each text. Return the texts.

        The parameter `prompt_name` selects the prompt. Without the parameter, the default prompt of
        the model is used, if it has one. Raises InvalidField for a prompt that the model lacks.
        """
        texts = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        return add_prompt(texts, parameters.get("prompt_name"), manifest)

    async def tokenize(
        self, request: TokenizeRequest, limits: LimitSettings, *, deadline_s: float
    ) -> list[TokenizedText]:
        """Tokenize each text without truncation.

        Raises InputTooLong if all texts together exceed `limits.item_chars` characters. The limit
        is low, because the JSON of a token is twenty times as long as the token.
        """
        length, max_chars = sum(map(len, request.texts)), limits.item_chars
        if length > max_chars:
            raise InputTooLong(
                f"`inputs` has {length} characters in total; the maximum is {max_chars}. Send "
                "fewer or shorter texts.",
                field="inputs",
            )
        async with enforce_deadline(deadline_s, LATE):
            tokens = await self._client.tokenize(request)
        return list(map(TokenizedText, request.texts, tokens))

    async def decode(
        self, request: DecodeRequest, limits: LimitSettings, *, deadline_s: float, path: str
    ) -> tuple[str, ...]:
        """Return the text of each sequence. Errors name the field `path`.

        Raises InputTooLong or UnknownToken.
        """
        _check_lengths(request.sequences, path, limits)
        try:
            async with enforce_deadline(deadline_s, LATE):
                return await self._client.decode(request)
        except UnknownToken as error:
            raise UnknownToken(f"`{path}`: {error.message}", field=path) from None


def _check_lengths(sequences: Sequence[Sequence[int]], path: str, limits: LimitSettings) -> None:
    # Limit token ids as if each were a character: few tokens are shorter than a character.
    for sequence in sequences:
        if len(sequence) > limits.item_chars:
            raise InputTooLong(
                f"`{path}` has a sequence of {len(sequence)} token ids; the maximum is "
                f"{limits.item_chars}. Send shorter sequences.",
                field=path,
            )
