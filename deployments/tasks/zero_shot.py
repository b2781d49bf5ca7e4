"""zero-shot-classification: labels of the request, scored by an entailment model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead, TaskName
from deployments.errors import TooManyItems
from deployments.tasks.base import (
    DecodeContext,
    Task,
    TaskInput,
    TextParameters,
    TruncatingParameters,
    as_list,
)
from deployments.tasks.inputs import Inputs, Many, NonEmptyText, one_or_many, parse_parameters
from deployments.tasks.numbers import softmax

LABELS_PATH = "parameters.candidate_labels"
# A small request body can expand to a huge call: texts times labels, and labels times the template
# length. These limits apply before the service counts the items of the call.
MAX_PAIRS = 16_384
MAX_TEMPLATE_CHARACTERS = 1_000
DEFAULT_TEMPLATE = "This example is {}."


def _comma_separated(value: Any) -> Any:
    """Split one string of labels, as clients of 2023 send it. Drop empty labels."""
    if not isinstance(value, str):
        return value
    return [part for part in map(str.strip, value.split(",")) if part]


CandidateLabels = Annotated[
    Many[NonEmptyText],
    BeforeValidator(_comma_separated, json_schema_input_type=str | list[NonEmptyText]),
]


class ZeroShotParameters(TruncatingParameters):
    candidate_labels: CandidateLabels
    multi_label: bool | None = None
    multi_class: bool | None = None  # former name of `multi_label`
    hypothesis_template: str = Field(DEFAULT_TEMPLATE, max_length=MAX_TEMPLATE_CHARACTERS)

    @field_validator("hypothesis_template", mode="before")
    @classmethod
    def _null_is_default_template(cls, value: Any) -> Any:
        return DEFAULT_TEMPLATE if value is None else value

    @field_validator("hypothesis_template")
    @classmethod
    def _has_one_placeholder(cls, template: str) -> str:
        split_template(template)
        return template

    @property
    def independent(self) -> bool:
        """Whether labels are scored independently; always for a single label."""
        several = self.multi_class if self.multi_label is None else self.multi_label
        return bool(several) or len(self.candidate_labels) == 1


class ZeroShotOptions(NamedTuple):
    sequences: tuple[str, ...]
    labels: tuple[str, ...]
    independent: bool
    single: bool  # False: the request has a list of texts


class LabeledSequence(TypedDict):
    """A text and its candidate labels with scores, best first."""

    sequence: str
    labels: list[str]
    scores: list[float]


class ZeroShotClassification(Task):
    """Task that returns the candidate labels of every text, best first.

    Each text is paired with the hypothesis of each label. The longer segment of a pair that exceeds
    the model's limit is truncated; this is usually the text.
    """

    name: ClassVar = TaskName.ZERO_SHOT_CLASSIFICATION
    head: ClassVar = ModelHead.LABELS
    inputs: ClassVar[Inputs[str | list[str]]] = Inputs(
        one_or_many(NonEmptyText), "a string or a list of strings"
    )
    parameters: ClassVar[type[TextParameters]] = ZeroShotParameters
    options_type: ClassVar[Any] = ZeroShotOptions
    response_type: ClassVar[Any] = LabeledSequence | list[LabeledSequence]
    example: ClassVar[Mapping[str, Any]] = {
        "inputs": "A film.",
        "parameters": {"candidate_labels": ["art", "food"]},
    }
    reads_pairs: ClassVar = True

    def fits(self, manifest: ArtifactManifest) -> bool:
        return manifest.head is ModelHead.LABELS and has_entailment_label(manifest.labels)

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        return parameters.get("candidate_labels") is not None

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """Parse a request body.

        Raises as Task.parse does, and TooManyItems for more than MAX_PAIRS pairs.
        """
        params = parse_parameters(ZeroShotParameters, parameters)
        texts, fields, single = as_list(self.inputs.read(inputs))
        labels = tuple(params.candidate_labels)
        count = len(texts) * len(labels)
        if count > MAX_PAIRS:
            raise TooManyItems(
                f"`{LABELS_PATH}` and `inputs` make {count} pairs; the maximum is {MAX_PAIRS}",
                field=LABELS_PATH,
            )
        before, after = split_template(params.hypothesis_template)
        hypotheses = [before + label + after for label in labels]
        return TaskInput(
            texts=tuple((text, hypothesis) for text in texts for hypothesis in hypotheses),
            # Errors about a pair that is too long name the path of its text.
            fields=tuple(field for field in fields for _ in labels),
            options=ZeroShotOptions(texts, labels, params.independent, single),
            truncation=params.choose_truncation(manifest),
            many=LABELS_PATH if single else "inputs",
            paired_with=None if single else LABELS_PATH,
        )

    def decode(
        self, context: DecodeContext, options: ZeroShotOptions
    ) -> LabeledSequence | list[LabeledSequence]:
        """Return an object for a single text, a list for a list of texts.

        Labels with equal scores stay in request order.
        """
        shape = (len(options.sequences), len(options.labels), -1)
        logits = np.array(context.rows).reshape(shape)
        scores = compute_label_scores(
            logits, context.manifest.labels, independent=options.independent
        )
        best = np.argsort(-scores, axis=1, kind="stable")
        results = [
            LabeledSequence(
                sequence=sequence,
                labels=[options.labels[i] for i in order],
                scores=[float(row[i]) for i in order],
            )
            for sequence, row, order in zip(options.sequences, scores, best, strict=True)
        ]
        return results[0] if options.single else results


def has_entailment_label(labels: Sequence[str]) -> bool:
    """Return whether there are several labels, one of which is entailment."""
    return len(labels) > 1 and any(map(_is_entailment, labels))


def compute_label_scores(
    logits: NDArray[np.float32], labels: Sequence[str], *, independent: bool
) -> NDArray[np.float32]:
    """Convert `logits` [texts, candidates, labels of the model] to scores [texts, candidates].

    Without `independent` the scores of a text sum to 1. With `independent` the score of a candidate
    is its softmax of entailment against contradiction. The two labels of the model are selected as
    in the transformers pipeline (5.23, zero_shot_classification.py).
    """
    entailment = next(i for i, label in enumerate(labels) if _is_entailment(label))
    if not independent:
        return softmax(logits[:, :, entailment])
    contradiction = 0 if entailment else len(labels) - 1
    return softmax(logits[:, :, [contradiction, entailment]])[:, :, 1]


def split_template(template: str) -> tuple[str, str]:
    """Split a template at its only placeholder `{}` or `{0}`.

    Raises PydanticCustomError for any other template.

    str.format is unsafe here: its syntax reads attributes and pads to any width, and templates are
    untrusted input.
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError:
        parts = []
    positions = [i for i, (_, name, _, _) in enumerate(parts) if name is not None]
    if len(positions) != 1 or parts[positions[0]][1:] not in (("", "", None), ("0", "", None)):
        raise PydanticCustomError("template", "must contain one placeholder `{}` for the label")
    literals = [literal for literal, *_ in parts]
    end = positions[0] + 1
    return "".join(literals[:end]), "".join(literals[end:])


def _is_entailment(label: str) -> bool:
    return label.lower().startswith("entail")
