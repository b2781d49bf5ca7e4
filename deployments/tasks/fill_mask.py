"""fill-mask: what may stand in the place of a mask token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead, TaskName
from deployments.errors import InvalidField
from deployments.messages import TokenIds
from deployments.tasks.base import DecodeContext, Task, TaskInput, TextParameters, as_list
from deployments.tasks.inputs import Inputs, NonEmptyText, one_or_many, parse_parameters
from deployments.tasks.numbers import softmax

if TYPE_CHECKING:  # the ingress, which parses, has no use for a tokenizer
    from deployments.tokenization.vocabulary import TokenVocabulary

DEFAULT_TOP_K = 5
# Each proposal repeats its text, and turning a million tokens to text takes the encoder 0.7 s.
MAX_TOKENS_PER_RESPONSE = 1_000_000
MAX_TARGETS = 1_000
MAX_TARGET_CHARACTERS = 200


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


MaskTarget = Annotated[str, Field(min_length=1, max_length=MAX_TARGET_CHARACTERS)]
MaskTargets = Annotated[
    list[MaskTarget],
    Field(min_length=1, max_length=MAX_TARGETS),
    BeforeValidator(_as_list, json_schema_input_type=MaskTarget | list[MaskTarget]),
]


class FillMaskParameters(TextParameters):
    """Parameters of fill-mask."""

    top_k: int | None = Field(None, ge=1)
    targets: MaskTargets | None = None


class FillMaskOptions(NamedTuple):
    """What to propose."""

    top_k: int
    targets: tuple[str, ...]  # the only proposals wanted; empty: any token of the vocabulary
    fields: tuple[str, ...]  # of the texts, for the error that only their tokens tell
    single: bool  # one text that came without a list


class MaskPrediction(TypedDict):
    """A token for a mask, how likely it is, and the text with it."""

    score: float
    token: int
    token_str: str
    sequence: str


Proposals: TypeAlias = (
    list[MaskPrediction] | list[list[MaskPrediction]]
)  # of one mask, or of each of several


class FillMask(Task):
    """For every mask of a text the likeliest tokens, best first."""

    name: ClassVar = TaskName.FILL_MASK
    head: ClassVar = ModelHead.MASKS
    inputs: ClassVar[Inputs[str | list[str]]] = Inputs(
        one_or_many(NonEmptyText), "a string or a list of strings"
    )
    parameters: ClassVar[type[TextParameters]] = FillMaskParameters
    response_type: ClassVar[Any] = Proposals | list[Proposals]
    example: ClassVar[Mapping[str, Any]] = {
        "inputs": "The food was [MASK].",
        "parameters": {"targets": ["good"]},
    }
    needs_vocabulary: ClassVar = True

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        """When a parameter is sent that only this task has."""
        return parameters.get("targets") is not None

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """`inputs`: a text or a list of texts."""
        params = parse_parameters(FillMaskParameters, parameters)
        texts, fields, single = as_list(self.inputs.read(inputs))
        top_k, targets = params.top_k or DEFAULT_TOP_K, tuple(params.targets or ())
        return TaskInput(
            texts=texts,
            fields=fields,
            options=FillMaskOptions(top_k, targets, fields, single),
            truncation=params.truncation,
        )

    def decode(
        self, context: DecodeContext, options: FillMaskOptions
    ) -> Proposals | list[Proposals]:
        """Per text the `top_k` best proposals, for several masks in a list per mask.

        Equal scores come in the order of the vocabulary. Raises InvalidField for a text without a
        mask, for targets that are no tokens, and for more text than MAX_TOKENS_PER_RESPONSE.
        """
        vocabulary, mask = context.words, context.manifest.mask_token
        if mask is None:
            raise AssertionError("this is a bug: a model for masks without a mask token")
        wanted = _select_choices(vocabulary, options.targets, context.manifest.output_width)
        top_k = min(options.top_k, len(wanted))
        ids = [item.ids for item in context.items]
        _check_masks(ids, mask, vocabulary.token(mask), options.fields)
        _check_size(ids, mask, top_k)
        answers = [
            _predict_masks(vocabulary, own, np.flatnonzero(own == mask), rows, wanted, top_k)
            for own, rows in zip(ids, context.rows, strict=True)
        ]
        return answers[0] if options.single else answers


def _select_choices(
    vocabulary: TokenVocabulary, targets: Sequence[str], width: int
) -> NDArray[np.intp]:
    """Ids of the tokens that may be proposed, in the order of the vocabulary."""
    if not targets:
        return np.arange(width)
    found = (vocabulary.first_token_id(target) for target in targets)
    # Tokens added to a tokenizer later may have no row in the model.
    ids = {token for token in found if token is not None and token < width}
    if not ids:
        raise InvalidField("`parameters.targets`: none is a token", field="parameters.targets")
    return np.array(sorted(ids))


def _check_masks(ids: Sequence[TokenIds], mask: int, spelt: str, fields: Sequence[str]) -> None:
    for own, field in zip(ids, fields, strict=True):
        if mask not in own:
            raise InvalidField(f"No mask_token ({spelt}) found on the input", field=field)


def _check_size(ids: Sequence[TokenIds], mask: int, top_k: int) -> None:
    tokens = top_k * sum(len(own) * int((own == mask).sum()) for own in ids)
    if tokens > MAX_TOKENS_PER_RESPONSE:
        raise InvalidField(
            f"`parameters.top_k`: {top_k} proposals for every mask repeat {tokens} tokens of text, "
            f"at most {MAX_TOKENS_PER_RESPONSE} are told at once; ask for fewer proposals or send fewer texts",
            field="parameters.top_k",
        )


def _predict_masks(
    vocabulary: TokenVocabulary,
    ids: TokenIds,
    masks: NDArray[np.intp],
    rows: NDArray[np.float32],
    choices: NDArray[np.intp],
    top_k: int,
) -> Proposals:
    """Of one text with `masks` at these places, whose logits are `rows` [M, W]."""
    alone = len(masks) == 1
    answers: list[list[MaskPrediction]] = []
    for place, row in zip(masks, rows, strict=True):  # a row at a time: W may be a quarter million
        scores = softmax(row)[choices]
        proposals: list[MaskPrediction] = []
        for best in _top_indices(scores, top_k):
            token = int(choices[best])
            filled = ids.tolist()
            filled[place] = token
            proposals.append(
                {
                    "score": float(scores[best]),
                    "token": token,
                    "token_str": vocabulary.text([token]),
                    # The other masks are special tokens too, and must stay to be seen.
                    "sequence": vocabulary.text(filled, skip_special=alone),
                }
            )
        answers.append(proposals)
    return answers[0] if alone else answers


def _top_indices(scores: NDArray[np.float32], top_k: int) -> NDArray[np.intp]:
    """Indices of the `top_k` highest scores, best first, equal ones in order."""
    least = np.partition(scores, -top_k)[-top_k]
    enough = np.flatnonzero(scores >= least)
    return enough[np.argsort(-scores[enough], kind="stable")][:top_k]
