"""text-classification: labels with scores, best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deployments.manifest import ArtifactManifest, TaskName
from deployments.tasks.base import (
    TaskInput,
    TextParameters,
    item_fields,
    parse_parameters,
    text_list,
)

Function = Literal["sigmoid", "softmax", "none"]


class ClassificationParameters(TextParameters):
    """Parameters of text-classification."""

    top_k: int | None = Field(None, ge=1)
    function_to_apply: Function | None = None


class ClassificationOptions(NamedTuple):
    """How logits become scores."""

    top_k: int
    function: Function


class TextClassification:
    """For every text its labels and scores, highest score first."""

    name: ClassVar = TaskName.TEXT_CLASSIFICATION
    parameters: ClassVar[type[TextParameters]] = ClassificationParameters

    def claims(self, inputs: Any) -> bool:
        """Never by shape: texts fit many tasks."""
        return False

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """`inputs`: a text or a list of texts."""
        asked = parse_parameters(ClassificationParameters, parameters)
        texts, single = text_list(inputs, "inputs")
        function = asked.function_to_apply or default_function(manifest)
        return TaskInput(
            texts=texts,
            fields=item_fields("inputs", len(texts), single=single),
            options=ClassificationOptions(asked.top_k or len(manifest.labels), function),
            truncation=asked.truncation,
        )

    def decode(
        self,
        answers: Sequence[NDArray[np.float32]],
        options: ClassificationOptions,
        manifest: ArtifactManifest,
    ) -> list[list[dict[str, Any]]]:
        """Per text the `top_k` best {"label", "score"}; equal scores in label order.

        Nested also for one text: clients take element 0 of the outer list.
        """
        scores = SCORES[options.function](np.stack(answers))
        best = np.argsort(-scores, axis=1, kind="stable")[:, : options.top_k]
        return [
            [{"label": manifest.labels[i], "score": float(row[i])} for i in order]
            for row, order in zip(scores, best, strict=True)
        ]


def default_function(manifest: ArtifactManifest) -> Function:
    """What transformers' own pipeline applies (5.23, text_classification.py)."""
    if manifest.problem == "regression":
        return "none"
    if manifest.problem == "multi_label" or len(manifest.labels) == 1:
        return "sigmoid"
    return "softmax"


def softmax(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Row-wise softmax, shifted so that it cannot overflow."""
    powers = np.exp(rows - rows.max(axis=1, keepdims=True))
    shares: NDArray[np.float32] = powers / powers.sum(axis=1, keepdims=True)
    return shares


def sigmoid(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Element-wise logistic function, through tanh so that it cannot overflow."""
    shares: NDArray[np.float32] = np.float32(0.5) * (1 + np.tanh(rows / 2))
    return shares


def unchanged(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The logits themselves."""
    return rows


SCORES = {"softmax": softmax, "sigmoid": sigmoid, "none": unchanged}
