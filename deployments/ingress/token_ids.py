"""Token ids in requests, in place of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from deployments.errors import EmptyInput
from deployments.tasks.inputs import Inputs, Many, NonEmptyText, list_or, union_of

TokenIdList = Many[Annotated[int, Field(ge=0, strict=True)]]


def _select_batch(value: Any) -> str:
    if not isinstance(value, list):
        return "text"
    return "ids" if value and type(value[0]) is int else "many"


TextOrIds = list_or(NonEmptyText, TokenIdList)
# A list of numbers is one sequence of token ids. A list of lists or texts is a batch.
TextsOrIds = union_of(
    _select_batch,
    text=NonEmptyText,
    ids=TokenIdList,
    many=Many[TextOrIds],  # type: ignore[valid-type]  # built by a function
)
IdsOrMany = union_of(
    lambda value: "many" if isinstance(value, list) and list in map(type, value[:1]) else "ids",
    ids=TokenIdList,
    many=Many[TokenIdList],
)
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
