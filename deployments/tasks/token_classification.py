"""token-classification: the entities in a text, with the characters where they stand."""

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

if TYPE_CHECKING:  # the ingress, which parses, has no use for a tokenizer
    from deployments.tokenization.vocabulary import TokenVocabulary

Strategy = Literal["none", "simple", "first", "average", "max"]
Entities = list[TokenEntity] | list[EntityGroup]
ScoredWindow = tuple[TokenizedItem, TokenOffsets, NDArray[np.float32]]  # logits [T, W]


class EntityParameters(TextParameters):
    """Parameters of token-classification."""

    aggregation_strategy: Annotated[Strategy | None, ANY_CASE] = None
    ignore_labels: Annotated[list[str], FailFastList()] | None = None
    # Tokens that neighbouring windows of a long text share; without it long texts are refused.
    stride: int | None = Field(None, ge=0)


class EntityOptions(NamedTuple):
    """How labelled tokens become entities."""

    strategy: Strategy
    ignored: tuple[str, ...]
    texts: tuple[str, ...]
    single: bool  # one text that did not come in a list


class TokenClassification(Task):
    """For every text its entities, in the order of the text."""

    name: ClassVar = TaskName.TOKEN_CLASSIFICATION
    head: ClassVar = ModelHead.TOKENS
    inputs: ClassVar[Inputs[str | list[str]]] = Inputs(
        one_or_many(NonEmptyText), "a string or a list of strings"
    )
    parameters: ClassVar[type[TextParameters]] = EntityParameters
    response_type: ClassVar[Any] = Entities | list[Entities]
    example: ClassVar[Mapping[str, Any]] = {
        "inputs": "A city.",
        "parameters": {"aggregation_strategy": "simple"},
    }
    needs_vocabulary: ClassVar = True

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        """When parameters are sent that only this task has."""
        return bool({"aggregation_strategy", "ignore_labels"} & set(parameters))

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """`inputs`: a text or a list of texts."""
        params = parse_parameters(EntityParameters, parameters)
        texts, fields, single = as_list(self.inputs.read(inputs))
        strategy = params.aggregation_strategy or "simple"
        _check_stride(params.stride, strategy, manifest.max_tokens)
        ignored = ("O",) if params.ignore_labels is None else tuple(params.ignore_labels)
        return TaskInput(
            texts=texts,
            fields=fields,
            options=EntityOptions(strategy, ignored, texts, single),
            truncation=params.truncation,
            windowing=Windowing(stride=params.stride),
        )

    def decode(self, context: DecodeContext, options: EntityOptions) -> Entities | list[Entities]:
        """A list of entities for a single text, a list of such lists for a list of texts."""
        labels, vocabulary = context.manifest.labels, context.words
        windows: list[list[ScoredWindow]] = [[] for _ in options.texts]
        parts = zip(context.items, context.token_offsets, context.rows, strict=True)
        for item, layout, logits in parts:
            windows[layout.text].append((item, layout, logits))
        answers = [
            _entities(text, own, labels, options, vocabulary)
            for text, own in zip(options.texts, windows, strict=True)
        ]
        return answers[0] if options.single else answers


def _check_stride(stride: int | None, strategy: Strategy, max_tokens: int) -> None:
    if stride is None:
        return
    if strategy == "none":
        raise InvalidField(
            "`parameters.stride` needs an `aggregation_strategy` other than `none`: single tokens "
            "of overlapping windows cannot be merged",
            field="parameters.stride",
        )
    most = max_tokens // 2 - 2  # what windows may share and still advance, special tokens aside
    if stride > most:
        raise InvalidField(
            f"`parameters.stride` is {stride}; it may be {most}, half of what the model reads",
            field="parameters.stride",
        )


def _entities(
    text: str,
    windows: list[ScoredWindow],
    labels: tuple[str, ...],
    options: EntityOptions,
    vocabulary: TokenVocabulary,
) -> Entities:
    read = [
        WindowTokens.read(text, item, layout, logits, vocabulary)
        for item, layout, logits in windows
    ]
    rule = options.strategy
    if rule == "none":
        return [
            entity for own in read for entity in list_token_entities(own, labels, options.ignored)
        ]
    groups: list[EntityGroup] = []
    for own in read:
        units = label_tokens(own) if rule == "simple" else label_words(own, rule)
        groups += group_entities(units, labels, options.ignored, vocabulary)
    return merge_windows(groups) if len(windows) > 1 else groups
