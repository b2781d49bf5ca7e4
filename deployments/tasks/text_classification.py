"""text-classification: labels with scores, best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator
from typing_extensions import TypedDict

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead, TaskName
from deployments.errors import InvalidField
from deployments.messages import Text
from deployments.tasks.base import DecodeContext, Task, TaskInput, TextParameters, as_list
from deployments.tasks.inputs import (
    ANY_CASE,
    Inputs,
    one_or_many,
    parse_parameters,
    require_text,
    text_or,
)
from deployments.tasks.numbers import identity, sigmoid, softmax

ScoreFunction = Literal["sigmoid", "softmax", "none"]

_LABEL_S = 8e-7  # seconds of `decode` per label of the result, on a core of an AMD EPYC


class ClassificationParameters(TextParameters):
    top_k: int | None = Field(None, ge=1)
    function_to_apply: Annotated[ScoreFunction | None, ANY_CASE] = None


class ClassificationOptions(NamedTuple):
    top_k: int
    function: ScoreFunction


class TextAndPair(BaseModel):
    """Two segments that are classified together. At least one of them must have text."""

    text: str
    text_pair: str | None = None

    @model_validator(mode="after")
    def _require_text(self) -> Self:
        require_text(self.text, self.text_pair)
        return self


class LabelScore(TypedDict):
    label: str
    score: float


class TextClassification(Task):
    """Task that returns the labels of every text or pair with their scores, highest first."""

    name: ClassVar = TaskName.TEXT_CLASSIFICATION
    head: ClassVar = ModelHead.LABELS
    inputs: ClassVar[Inputs[Any]] = Inputs(
        one_or_many(text_or(TextAndPair)),
        "a string, an object with `text` and `text_pair`, or a list of these",
    )
    parameters: ClassVar[type[TextParameters]] = ClassificationParameters
    options_type: ClassVar[Any] = ClassificationOptions
    response_type: ClassVar[Any] = list[list[LabelScore]]
    example: ClassVar[Mapping[str, Any]] = {"inputs": "A lovely film."}

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        first = inputs[0] if isinstance(inputs, list) and inputs else inputs
        pair = isinstance(first, dict) and "text" in first
        return pair or "function_to_apply" in parameters

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """Parse `inputs`: a text, a pair of texts, or a list of these."""
        params = parse_parameters(ClassificationParameters, parameters)
        given, fields, _ = as_list(self.inputs.read(inputs))
        texts = tuple(map(_text, given))
        if manifest.pair_template is not None:
            _require_pairs(texts, fields)
        function = params.function_to_apply or select_score_function(manifest)
        return TaskInput(
            texts=texts,
            fields=fields,
            options=ClassificationOptions(params.top_k or len(manifest.labels), function),
            truncation=params.choose_truncation(manifest),
        )

    def decode(
        self, context: DecodeContext, options: ClassificationOptions
    ) -> list[list[LabelScore]]:
        """Return the `top_k` labels per text; equal scores in label order.

        The result is a list of lists even for one text: clients read element 0 of the outer list.
        """
        labels = context.manifest.labels
        scores = SCORES[options.function](np.array(context.rows))
        best = np.argsort(-scores, axis=1, kind="stable")[:, : options.top_k]
        return [
            [{"label": labels[i], "score": float(row[i])} for i in order]
            for row, order in zip(scores, best, strict=True)
        ]

    def predict_decode_s(self, context: DecodeContext, options: ClassificationOptions) -> float:
        labels = len(context.rows) * min(options.top_k, len(context.manifest.labels))
        return super().predict_decode_s(context, options) + _LABEL_S * labels


def _text(item: str | TextAndPair) -> Text:
    if isinstance(item, str):
        return item
    return item.text if item.text_pair is None else (item.text, item.text_pair)


def _require_pairs(texts: Sequence[Text], fields: Sequence[str]) -> None:
    for text, field in zip(texts, fields, strict=True):
        if isinstance(text, str):
            raise InvalidField(
                f"`{field}` must be an object with `text` and `text_pair`: the model reads a query "
                "and a document",
                field=field,
            )


def select_score_function(manifest: ArtifactManifest) -> ScoreFunction:
    """Return the score function that the transformers pipeline (5.23) uses by default."""
    if manifest.problem_type == "regression":
        return "none"
    if manifest.problem_type == "multi_label" or len(manifest.labels) == 1:
        return "sigmoid"
    return "softmax"


SCORES = {"softmax": softmax, "sigmoid": sigmoid, "none": identity}
