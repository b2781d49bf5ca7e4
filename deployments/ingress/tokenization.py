"""Token ids in requests, and what only a tokenizer is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from deployments.artifacts.manifest import ArtifactManifest
from deployments.config import IngressUserConfig, LimitSettings
from deployments.errors import DeadlineExceeded, InputTooLong, UnknownToken
from deployments.messages import DecodeRequest, ModelRef, TextTokens, TokenizeRequest
from deployments.tasks.embedding import add_prompt
from deployments.tasks.inputs import Inputs, Many, NonEmptyText
from deployments.transports.base import TokenizerClient

# Branches of unions; see tasks/inputs.py for their brackets.
_TEXT, _IDS, _MANY = "<text>", "<ids>", "<many>"


def _text_or_ids(value: Any) -> str:
    return _IDS if isinstance(value, list) else _TEXT


def _one_or_many(value: Any) -> str:
    if not isinstance(value, list):
        return _TEXT
    return _IDS if value and type(value[0]) is int else _MANY


TokenIdList = Many[Annotated[int, Field(ge=0, strict=True)]]
TextOrIds = Annotated[
    Annotated[NonEmptyText, Tag(_TEXT)] | Annotated[TokenIdList, Tag(_IDS)],
    Discriminator(_text_or_ids),
]
# A list of numbers is one sequence of token ids; of lists, or of texts and lists, a batch.
TextsOrIds = Annotated[
    Annotated[NonEmptyText, Tag(_TEXT)]
    | Annotated[TokenIdList, Tag(_IDS)]
    | Annotated[Many[TextOrIds], Tag(_MANY)],
    Discriminator(_one_or_many),
]
IdsOrMany = Annotated[
    Annotated[TokenIdList, Tag(_IDS)] | Annotated[Many[TokenIdList], Tag(_MANY)],
    Discriminator(
        lambda value: _MANY if isinstance(value, list) and list in map(type, value[:1]) else _IDS
    ),
]
TEXTS_OR_IDS: Inputs[str | list[Any]] = Inputs(
    TextsOrIds, "a string, a list of token ids, or a list of these"
)


@dataclass(frozen=True, slots=True)
class TokenIdInputs:
    """Inputs among which there are token ids."""

    given: tuple[str | tuple[int, ...], ...]
    single: bool  # one sequence that did not come in a list
    path: str = "inputs"  # of the request

    @property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """The token ids among what was given."""
        return tuple(one for one in self.given if not isinstance(one, str))


def parse_token_ids(inputs: Any) -> Any:
    """`inputs`, as TokenIdInputs where it holds token ids. Raises InvalidField or EmptyInput."""
    if not isinstance(inputs, list) or not any(type(one) in (int, list) for one in inputs):
        return inputs
    return token_sequences(TEXTS_OR_IDS.read(inputs))


def token_sequences(valid: Sequence[Any], path: str = "inputs") -> TokenIdInputs:
    """Of one list of ids, or of a list that has such lists in it."""
    single = type(valid[0]) is int
    given = (
        (tuple(valid),)
        if single
        else tuple(one if isinstance(one, str) else tuple(one) for one in valid)
    )
    return TokenIdInputs(given, single, path)


def replace_ids_with_texts(given: TokenIdInputs, texts: Sequence[str]) -> str | list[str]:
    """The inputs with `texts` in the places of the token ids, one for each sequence."""
    fresh = iter(texts)
    filled = [one if isinstance(one, str) else next(fresh) for one in given.given]
    return filled[0] if given.single else filled


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text, as the tokenizer got it, and its tokens."""

    text: str
    tokens: TextTokens


class TokenizationService:
    """Asks the tokenizer, within limits and in time."""

    def __init__(self, client: TokenizerClient) -> None:
        self._client = client

    def texts_of(
        self, inputs: str | Sequence[str], parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> tuple[str, ...]:
        """The texts to tokenize, behind the prompt asked for. Raises InvalidField."""
        texts = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        return add_prompt(texts, parameters.get("prompt_name"), manifest)

    async def tokens(
        self,
        model: ModelRef,
        texts: tuple[str, ...],
        settings: IngressUserConfig,
        *,
        special: bool,
    ) -> list[TokenizedText]:
        """The tokens of each text, none cut off.

        Raises InputTooLong when all texts together are longer than one may be: every token is
        told, and a token's description is twenty times as long as the token.
        """
        length, most = sum(map(len, texts)), settings.limits.item_chars
        if length > most:
            raise InputTooLong(
                f"`inputs` has {length} characters in all, at most {most} are tokenized at once",
                field="inputs",
            )
        async with _in_time(settings):
            tokens = await self._client.tokenize(TokenizeRequest(model, texts, special))
        return list(map(TokenizedText, texts, tokens))

    async def texts(
        self,
        model: ModelRef,
        given: TokenIdInputs,
        settings: IngressUserConfig,
        *,
        skip_special: bool,
    ) -> tuple[str, ...]:
        """The text of each sequence. Raises InputTooLong, or UnknownToken."""
        sequences = given.sequences
        _check_lengths(given, settings.limits)
        try:
            async with _in_time(settings):
                return await self._client.decode(DecodeRequest(model, sequences, skip_special))
        except UnknownToken as error:
            raise UnknownToken(f"`{given.path}`: {error.message}", field=given.path) from None


def _check_lengths(given: TokenIdInputs, limits: LimitSettings) -> None:
    for sequence in given.sequences:
        if len(sequence) > limits.item_chars:  # hardly a token has less than a character
            raise InputTooLong(
                f"`{given.path}` has a sequence of {len(sequence)} token ids, at most "
                f"{limits.item_chars} are read",
                field=given.path,
            )


@asynccontextmanager
async def _in_time(settings: IngressUserConfig) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(settings.timeout_s):
            yield
    except TimeoutError as exc:
        raise DeadlineExceeded("the tokenizer did not answer in time") from exc
