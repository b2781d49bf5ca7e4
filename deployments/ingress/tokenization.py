"""Token ids in requests, and calls that use only the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from deployments.artifacts.manifest import ArtifactManifest
from deployments.config import LimitSettings
from deployments.deadlines import enforce_deadline
from deployments.errors import EmptyInput, InputTooLong, UnknownToken
from deployments.messages import DecodeRequest, TextTokens, TokenizeRequest
from deployments.tasks.embedding import add_prompt
from deployments.tasks.inputs import Inputs, Many, NonEmptyText
from deployments.transports.base import TokenizerClient

LATE = "the tokenizer exceeded the deadline of the request"
# Tags of pydantic unions. tasks/inputs.py removes tags in angle brackets from error paths.
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
# A list of numbers is one sequence of token ids. A list of lists or texts is a batch.
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
    """Inputs with at least one sequence of token ids."""

    values: tuple[str | tuple[int, ...], ...]
    single: bool  # the request has one bare sequence instead of a list of sequences
    path: str = "inputs"  # field of the request

    @property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """The values that are token ids instead of texts."""
        return tuple(value for value in self.values if not isinstance(value, str))


def parse_token_ids(inputs: Any) -> Any:
    """Return TokenIdInputs if `inputs` has token ids, else `inputs`.

    Raises InvalidField or EmptyInput.
    """
    if not isinstance(inputs, list) or not any(type(value) in (int, list) for value in inputs):
        return inputs
    return build_token_id_inputs(TEXTS_OR_IDS.read(inputs))


def build_token_id_inputs(valid: Sequence[Any], path: str = "inputs") -> TokenIdInputs:
    """Build TokenIdInputs from a validated list.

    The list has either token ids, or texts and lists of token ids.
    """
    single = type(valid[0]) is int
    values = (
        (tuple(valid),)
        if single
        else tuple(value if isinstance(value, str) else tuple(value) for value in valid)
    )
    return TokenIdInputs(values, single, path)


def replace_ids_with_texts(inputs: TokenIdInputs, texts: Sequence[str]) -> str | list[str]:
    """Replace each sequence of token ids with the next of `texts`.

    Raises EmptyInput for a sequence without text.
    """
    remaining = iter(texts)
    filled = [value if isinstance(value, str) else next(remaining) for value in inputs.values]
    if "" in filled:  # request texts are never empty, so this text was decoded from ids
        path = inputs.path if inputs.single else f"{inputs.path}[{filled.index('')}]"
        raise EmptyInput(f"`{path}` has only special tokens", field=path)
    return filled[0] if inputs.single else filled


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
