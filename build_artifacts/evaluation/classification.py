"""Evaluation of text-classification: one label, several labels, or a number per text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from build_artifacts.errors import BuildError
from build_artifacts.evaluation.base import (
    EvaluatedModel,
    Evaluation,
    ExampleSampling,
    Output,
    ReducedOutput,
    tokenize_texts,
)
from build_artifacts.evaluation.files import (
    FileLayout,
    FileLocation,
    Record,
    as_number,
    read_records,
)
from build_artifacts.evaluation.labels import LabelIndex
from build_artifacts.evaluation.metrics import accuracy, macro_f1, micro_f1, pearson, spearman
from deployments.messages import Text, TokenizedItem

EXPECTED = (
    "`text` and `label` (`labels` for several labels, `score` for a number): "
    "tab-separated columns, or JSON lines in a .jsonl"
)


def load_classification(path: Path, model: EvaluatedModel, sampling: ExampleSampling) -> Evaluation:
    """Load one item per example.

    Raises BadEvaluationData for an unusable file, and BuildError for a regression model that
    returns several scores per text.
    """
    # A model with one score per text cannot choose a label. Its metric is the correlation of the
    # scores with the numbers in the file.
    problem = "regression" if len(model.labels) == 1 else model.problem_type or "single_label"
    load = _LOADERS[problem]
    return load(FileLocation(path, EXPECTED), model, sampling)


def _load_single(
    location: FileLocation, model: EvaluatedModel, sampling: ExampleSampling
) -> Evaluation:
    labels = LabelIndex(model.labels)
    records = read_records(location, _build_layout(lambda cell: labels.find(cell) is not None))
    expected = [labels.index(r.require("label"), r, "label") for r in records]
    examples = sampling.sample(list(zip(map(_build_text, records), expected, strict=True)))
    items = tokenize_texts(model, [text for text, _ in examples])
    return SingleLabelEvaluation(
        items, _one_hot([[label] for _, label in examples], len(model.labels))
    )


def _load_multi(
    location: FileLocation, model: EvaluatedModel, sampling: ExampleSampling
) -> Evaluation:
    labels = LabelIndex(model.labels)

    def fits(cell: str) -> bool:
        return all(labels.find(part) is not None for part in _split_labels(cell, labels))

    records = read_records(location, _build_layout(fits))
    label_sets = [_parse_labels(record, labels) for record in records]
    examples = sampling.sample(list(zip(map(_build_text, records), label_sets, strict=True)))
    expected = _one_hot([label_set for _, label_set in examples], len(model.labels))
    if not expected.any():
        raise location.data_error("no example has a label")
    return MultiLabelEvaluation(tokenize_texts(model, [text for text, _ in examples]), expected)


def _load_regression(
    location: FileLocation, model: EvaluatedModel, sampling: ExampleSampling
) -> Evaluation:
    if len(model.labels) > 1:
        raise BuildError(
            f"the model returns {len(model.labels)} scores per text; labeled data can have one",
            hint="build without labeled data: the accuracy gate then compares all scores for the "
            "probe texts",
        )
    records = read_records(location, _build_layout(lambda cell: as_number(cell) is not None))
    examples = sampling.sample(
        [(_build_text(record), record.number("label")) for record in records]
    )
    scores = [score for _, score in examples]
    if len(set(scores)) < 2:
        raise location.data_error("all scores are equal, so they have no order")
    return RegressionEvaluation(tokenize_texts(model, [text for text, _ in examples]), scores)


_LOADERS: dict[str, Callable[[FileLocation, EvaluatedModel, ExampleSampling], Evaluation]] = {
    "single_label": _load_single,
    "multi_label": _load_multi,
    "regression": _load_regression,
}


def _build_layout(fits: Callable[[str], bool]) -> FileLayout:
    return FileLayout(
        names={
            "text": ("text", "sentence", "sentence1"),
            "text_pair": ("text_pair", "sentence2"),
            "label": ("label", "labels", "score"),
        },
        required=frozenset(("text", "label")),
        orders=(
            ("label", "text"),
            ("text", "label"),
            ("text", "text_pair", "label"),
            ("label", "text", "text_pair"),
        ),
        key="label",
        fits=fits,
    )


def _build_text(record: Record) -> Text:
    first = record.text("text")
    return (first, record.text("text_pair")) if record.values.get("text_pair") else first


def _parse_labels(record: Record, labels: LabelIndex) -> list[int]:
    value = record.require("label")
    parts = (
        value
        if isinstance(value, list)
        else _split_labels(value, labels)
        if isinstance(value, str)
        else None
    )
    if parts is None:
        raise record.data_error("not a list of labels", "label")
    return [labels.index(part, record, "label") for part in parts]


def _split_labels(cell: str, labels: LabelIndex) -> list[str]:
    """Return the labels in `cell`: one with a comma in its name, or several between commas."""
    if labels.find(cell) is not None:
        return [cell]
    return [part for part in cell.split(",") if part.strip()]


def _one_hot(label_sets: Sequence[Sequence[int]], labels: int) -> NDArray[np.bool_]:
    """Return [N, labels], True at the labels of each set."""
    bits = np.zeros((len(label_sets), labels), dtype=np.bool_)
    for row, indices in zip(bits, label_sets, strict=True):
        row[list(indices)] = True
    return bits


class SingleLabelEvaluation(Evaluation):
    """One label per text. The accuracy gate uses `accuracy`; `macro_f1` is only reported."""

    def __init__(self, items: Sequence[TokenizedItem], expected: NDArray[np.bool_]) -> None:
        super().__init__(items, "accuracy")
        self._expected = expected  # [N, labels]

    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        best = np.stack(reduced).argmax(axis=1)
        predicted = _one_hot([[int(label)] for label in best], self._expected.shape[1])
        return {
            "accuracy": accuracy(best, self._expected.argmax(axis=1)),
            "macro_f1": macro_f1(predicted, self._expected),
        }

    def _reduce(self, index: int, output: Output) -> ReducedOutput:
        return output.copy()


class MultiLabelEvaluation(Evaluation):
    """Several labels per text, predicted by a probability above 0.5. The gate uses `micro_f1`."""

    def __init__(self, items: Sequence[TokenizedItem], expected: NDArray[np.bool_]) -> None:
        super().__init__(items, "micro_f1")
        self._expected = expected  # [N, labels]

    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        predicted = np.stack(reduced) > 0  # a logit above 0 is a probability above 0.5
        return {
            "micro_f1": micro_f1(predicted, self._expected),
            "macro_f1": macro_f1(predicted, self._expected),
        }

    def _reduce(self, index: int, output: Output) -> ReducedOutput:
        return output.copy()


class RegressionEvaluation(Evaluation):
    """A number per text. The accuracy gate uses `spearman`; `pearson` is only reported."""

    def __init__(self, items: Sequence[TokenizedItem], scores: Sequence[float]) -> None:
        super().__init__(items, "spearman")
        self._scores = scores

    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        """Return `spearman` and `pearson`, each from -1 to 1."""
        predicted = np.stack(reduced)[:, 0]
        return {
            "spearman": spearman(predicted, self._scores),
            "pearson": pearson(predicted, self._scores),
        }

    def _reduce(self, index: int, output: Output) -> ReducedOutput:
        return output.copy()
