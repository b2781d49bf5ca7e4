"""token-classification: entities of a text with their character ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead, TaskName
from deployments.errors import InvalidField
from deployments.messages import TokenizedItem, TokenOffsets, Windowing
from deployments.tasks.base import DecodeContext, Task, TaskInput, TextParameters, as_list
from deployments.tasks.entities import (
    EntityGroup,
    TokenEntity,
    WindowTokens,
    group_entities,
    label_tokens,
    label_words,
    list_token_entities,
    merge_windows,
)
from deployments.tasks.inputs import (
    ANY_CASE,
    FailFastList,
    Inputs,
    NonEmptyText,
    one_or_many,
    parse_parameters,
)

if TYPE_CHECKING:  # keeps the tokenizers library out of the ingress
    from deployments.tokenization.vocabulary import TokenVocabulary

# Seconds of `decode` per token.
_TOKEN_S = 4e-6

Strategy = Literal["none", "simple", "first", "average", "max"]
Entities = list[TokenEntity] | list[EntityGroup]
ScoredWindow = tuple[TokenizedItem, TokenOffsets, NDArray[np.float32]]  # logits [T, W]


class EntityParameters(TextParameters):
    aggregation_strategy: Annotated[Strategy | None, ANY_CASE] = None
    ignore_labels: Annotated[list[str], FailFastList()] | None = None
    # Tokens shared by adjacent windows of a long text. None: a long text is truncated or rejected.
    stride: int | None = Field(None, ge=0)


class EntityOptions(NamedTuple):
    strategy: Strategy
    ignored: tuple[str, ...]
    texts: tuple[str, ...]
    single: bool  # False: the request has a list of texts


class TokenClassification(Task):
    """Task that returns the entities of every text in text order."""

    name: ClassVar = TaskName.TOKEN_CLASSIFICATION
    head: ClassVar = ModelHead.TOKENS
    inputs: ClassVar[Inputs[str | list[str]]] = Inputs(
        one_or_many(NonEmptyText), "a string or a list of strings"
    )
    parameters: ClassVar[type[TextParameters]] = EntityParameters
    options_type: ClassVar[Any] = EntityOptions
    response_type: ClassVar[Any] = Entities | list[Entities]
    example: ClassVar[Mapping[str, Any]] = {
        "inputs": "A city.",
        "parameters": {"aggregation_strategy": "simple"},
    }
    needs_vocabulary: ClassVar = True

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        return bool({"aggregation_strategy", "ignore_labels"} & set(parameters))

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        params = parse_parameters(EntityParameters, parameters)
        texts, fields, single = as_list(self.inputs.read(inputs))
        strategy = params.aggregation_strategy or "simple"
        _check_stride(params.stride, strategy, manifest.max_tokens)
        ignored = ("O",) if params.ignore_labels is None else tuple(params.ignore_labels)
        return TaskInput(
            texts=texts,
            fields=fields,
            options=EntityOptions(strategy, ignored, texts, single),
            truncation=params.choose_truncation(manifest),
            windowing=Windowing(stride=params.stride),
        )

    def decode(self, context: DecodeContext, options: EntityOptions) -> Entities | list[Entities]:
        """Return a list of entities for a single text, or a list per text for a list of texts."""
        labels, vocabulary = context.manifest.labels, context.require_vocabulary()
        windows: list[list[ScoredWindow]] = [[] for _ in options.texts]
        parts = zip(context.items, context.token_offsets, context.rows, strict=True)
        for item, layout, logits in parts:
            windows[layout.text].append((item, layout, logits))
        answers = [
            _entities(text, own, labels, options, vocabulary)
            for text, own in zip(options.texts, windows, strict=True)
        ]
        return answers[0] if options.single else answers

    def predict_decode_s(self, context: DecodeContext, options: EntityOptions) -> float:
        tokens = sum(len(item.ids) for item in context.items)
        return super().predict_decode_s(context, options) + _TOKEN_S * tokens


def _check_stride(stride: int | None, strategy: Strategy, max_tokens: int) -> None:
    if stride is None:
        return
    if strategy == "none":
        raise InvalidField(
            "`parameters.stride` requires an `aggregation_strategy` other than `none`: tokens of "
            "overlapping windows cannot be merged",
            field="parameters.stride",
        )
    max_stride = max_tokens // 2 - 2  # so that windows advance despite two special tokens
    if stride > max_stride:
        raise InvalidField(
            f"`parameters.stride` is {stride}; the maximum for this model is {max_stride}",
            field="parameters.stride",
        )


def _entities(
    text: str,
    windows: list[ScoredWindow],
    labels: tuple[str, ...],
    options: EntityOptions,
    vocabulary: TokenVocabulary,
) -> Entities:
    tokens_by_window = [
        WindowTokens.read(text, item, layout, logits, vocabulary)
        for item, layout, logits in windows
    ]
    rule = options.strategy
    if rule == "none":
        return [
            entity
            for own in tokens_by_window
            for entity in list_token_entities(own, labels, options.ignored)
        ]
    groups: list[EntityGroup] = []
    for own in tokens_by_window:
        spans = label_tokens(own) if rule == "simple" else label_words(own, rule)
        groups += group_entities(spans, labels, options.ignored, vocabulary)
    return merge_windows(groups) if len(windows) > 1 else groups
