"""fill-mask: the most likely tokens for the mask tokens of a text."""

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
from deployments.top_indices import top_indices

if TYPE_CHECKING:  # keeps the tokenizers library out of the ingress
    from deployments.tokenization.vocabulary import TokenVocabulary

DEFAULT_TOP_K = 5
# Limit of the tokens in all predictions of a response. Each prediction repeats its text.
MAX_TOKENS_PER_RESPONSE = 1_000_000
# Seconds of `decode` per prediction, and per token that the prediction repeats.
_PREDICTION_S, _TOKEN_S = 1e-5, 7e-7
# Seconds of `decode` per target, and per character of a target.
_TARGET_S, _CHARACTER_S = 5e-6, 8e-7
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
    top_k: int | None = Field(None, ge=1)
    targets: MaskTargets | None = None


class FillMaskOptions(NamedTuple):
    top_k: int
    targets: tuple[str, ...]  # allowed tokens; empty allows the whole vocabulary
    fields: tuple[str, ...]  # request paths of the texts, for errors found after tokenization
    single: bool  # False: the request has a list of texts


class MaskPrediction(TypedDict):
    """A token for a mask, its probability, and the text with the token."""

    score: float
    token: int
    token_str: str
    sequence: str


# A list of predictions for one mask, or a list of such lists for several masks.
Proposals: TypeAlias = list[MaskPrediction] | list[list[MaskPrediction]]


class FillMask(Task):
    """Task that returns the most likely tokens for every mask, best first."""

    name: ClassVar = TaskName.FILL_MASK
    head: ClassVar = ModelHead.MASKS
    inputs: ClassVar[Inputs[str | list[str]]] = Inputs(
        one_or_many(NonEmptyText), "a string or a list of strings"
    )
    parameters: ClassVar[type[TextParameters]] = FillMaskParameters
    options_type: ClassVar[Any] = FillMaskOptions
    response_type: ClassVar[Any] = Proposals | list[Proposals]
    example: ClassVar[Mapping[str, Any]] = {
        "inputs": "The food was [MASK].",
        "parameters": {"targets": ["good"]},
    }
    needs_vocabulary: ClassVar = True

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        return parameters.get("targets") is not None

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        params = parse_parameters(FillMaskParameters, parameters)
        texts, fields, single = as_list(self.inputs.read(inputs))
        top_k, targets = params.top_k or DEFAULT_TOP_K, tuple(params.targets or ())
        return TaskInput(
            texts=texts,
            fields=fields,
            options=FillMaskOptions(top_k, targets, fields, single),
            truncation=params.choose_truncation(manifest),
        )

    def decode(
        self, context: DecodeContext, options: FillMaskOptions
    ) -> Proposals | list[Proposals]:
        """Return the `top_k` predictions per text; a text with several masks has a list per mask.

        There are fewer predictions if fewer tokens are allowed. Equal scores are in vocabulary
        order. Raises InvalidField if a text has no mask, if no target is a token, or if the
        response would exceed MAX_TOKENS_PER_RESPONSE.
        """
        vocabulary, mask = context.require_vocabulary(), context.manifest.mask_token
        if mask is None:
            raise AssertionError("bug: a fill-mask model without a mask token")
        allowed = _select_choices(vocabulary, options.targets, context.manifest.output_width)
        top_k = min(options.top_k, len(allowed))
        ids = [item.ids for item in context.items]
        _check_masks(ids, mask, vocabulary.token(mask), options.fields)
        _check_size(ids, mask, top_k)
        answers = [
            _predict_masks(vocabulary, own, np.flatnonzero(own == mask), rows, allowed, top_k)
            for own, rows in zip(ids, context.rows, strict=True)
        ]
        return answers[0] if options.single else answers

    def predict_decode_s(self, context: DecodeContext, options: FillMaskOptions) -> float:
        mask, ids = context.manifest.mask_token, [item.ids for item in context.items]
        top_k = min(options.top_k, len(options.targets) or context.manifest.output_width)
        predictions, tokens = _count_predictions(ids, mask, top_k)
        proposing_s = _PREDICTION_S * predictions + _TOKEN_S * tokens
        choosing_s = sum(_TARGET_S + _CHARACTER_S * len(target) for target in options.targets)
        return super().predict_decode_s(context, options) + proposing_s + choosing_s


def _select_choices(
    vocabulary: TokenVocabulary, targets: Sequence[str], width: int
) -> NDArray[np.intp]:
    """Return the ids of the allowed tokens in vocabulary order."""
    if not targets:
        return np.arange(width)
    token_ids = (vocabulary.first_token_id(target) for target in targets)
    # The model may have no output for tokens that were added to the tokenizer.
    ids = {token for token in token_ids if token is not None and token < width}
    if not ids:
        raise InvalidField(
            "`parameters.targets`: no target is a token of the model", field="parameters.targets"
        )
    return np.array(sorted(ids))


def _check_masks(ids: Sequence[TokenIds], mask: int, spelling: str, fields: Sequence[str]) -> None:
    for own, field in zip(ids, fields, strict=True):
        if mask not in own:
            raise InvalidField(f"No mask_token ({spelling}) found on the input", field=field)


def _count_predictions(ids: Sequence[TokenIds], mask: int | None, top_k: int) -> tuple[int, int]:
    """Count the predictions of a call, and the tokens in them: each repeats its text."""
    masks = [int((own == mask).sum()) for own in ids]
    tokens = sum(len(own) * count for own, count in zip(ids, masks, strict=True))
    return top_k * sum(masks), top_k * tokens


def _check_size(ids: Sequence[TokenIds], mask: int, top_k: int) -> None:
    _, tokens = _count_predictions(ids, mask, top_k)
    if tokens > MAX_TOKENS_PER_RESPONSE:
        raise InvalidField(
            f"`parameters.top_k` is {top_k}: the response would repeat {tokens} tokens; the "
            f"maximum is {MAX_TOKENS_PER_RESPONSE}. Lower `top_k` or send fewer texts",
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
    """Predict the masks of one text; `rows` [M, W] are the logits at the positions `masks`."""
    is_single = len(masks) == 1
    answers: list[list[MaskPrediction]] = []
    for position, row in zip(masks, rows, strict=True):  # row by row for memory: W may be 250,000
        scores = softmax(row)[choices]
        proposals: list[MaskPrediction] = []
        for best in top_indices(scores, top_k):
            token = int(choices[best])
            filled = ids.tolist()
            filled[position] = token
            proposals.append(
                {
                    "score": float(scores[best]),
                    "token": token,
                    "token_str": vocabulary.text([token]),
                    # With several masks, keep special tokens, so that the other masks are visible.
                    "sequence": vocabulary.text(filled, skip_special=is_single),
                }
            )
        answers.append(proposals)
    return answers[0] if is_single else answers
