"""Evaluation of question-answering: spans of the model compared with SQuAD answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.evaluation.base import (
    EvaluatedModel,
    Evaluation,
    ExampleSampling,
    Output,
    ReducedOutput,
)
from build_artifacts.evaluation.files import FileLocation
from build_artifacts.evaluation.squad import (
    EXPECTED,
    SquadQuestion,
    exact_match,
    overlap_f1,
    read_questions,
)
from deployments.errors import InputTooLong
from deployments.messages import TokenizedItem, TokenOffsets, Truncation
from deployments.tasks.question_answering import build_question_windowing
from deployments.tokenization.windows import WindowTokenizer

MAX_ANSWER_TOKENS = 30


@dataclass(frozen=True, slots=True)
class QuestionWindow:
    """One item: a window of the context of a question, and the index of the question."""

    question: int
    first: int  # index of the first context token in the item
    offsets: NDArray[np.int32]  # [context tokens, 2], character range of each token in the context


class _WindowSpan(NamedTuple):
    """The best span of a window. The fields are the four numbers of a ReducedOutput."""

    score: float
    start: float  # index among the context tokens of the window
    end: float  # index of the last token of the span
    no_answer: float  # score of the first token as a span, which means "no answer"


class _QuestionSpan(NamedTuple):
    """The best span over all windows of a question."""

    text: str
    score: float
    no_answer: float


def load_question_answering(
    path: Path, model: EvaluatedModel, sampling: ExampleSampling
) -> Evaluation:
    """Load the questions and split them into windows as in serving.

    Raises BadEvaluationData for an unusable file.
    """
    numbered = sampling.sample(list(enumerate(read_questions(path), start=1)))
    tokenizer = WindowTokenizer(model.directory, model.max_tokens)
    windowing = build_question_windowing(model.max_tokens)
    items: list[TokenizedItem] = []
    windows: list[QuestionWindow] = []
    for i, (number, question) in enumerate(numbered):
        pair = (question.question, question.context)
        try:
            tokenized, _ = tokenizer.windows(pair, i, windowing, Truncation.REFUSE)
        except InputTooLong as exc:
            location = FileLocation(path, EXPECTED).at(f"question {number}")
            raise location.data_error(f"it {exc.message}") from exc
        items += [item for item, _ in tokenized]
        windows += [_build_window(offsets) for _, offsets in tokenized]
    return QuestionAnsweringEvaluation(items, windows, [question for _, question in numbered])


def _build_window(tokens: TokenOffsets) -> QuestionWindow:
    context = np.flatnonzero(tokens.segments == 1)
    return QuestionWindow(
        tokens.text, int(context[0]) if len(context) else 0, tokens.offsets[context]
    )


class QuestionAnsweringEvaluation(Evaluation):
    """SQuAD metrics. The accuracy gate uses `f1`; `exact_match` is only reported.

    If some questions have no answer, the predicted answer is empty when the no-answer score is
    higher than the best span's score. `answerable_f1` and `answerable_exact_match` then score the
    best spans of the questions with an answer.
    """

    def __init__(
        self,
        items: Sequence[TokenizedItem],
        windows: Sequence[QuestionWindow],
        questions: Sequence[SquadQuestion],
    ) -> None:
        super().__init__(items, "f1")
        self._windows = windows
        self._questions = questions

    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        """Return the means of `f1` and `exact_match` over the questions.

        If only some questions have an answer, add `answerable_f1` and `answerable_exact_match`.
        """
        spans = self._best_spans(reduced)
        answerable = [i for i, question in enumerate(self._questions) if question.golds]
        if len(answerable) == len(self._questions):
            return self._means([span.text for span in spans], answerable)
        decided = [span.text if span.score >= span.no_answer else "" for span in spans]
        scores = self._means(decided, range(len(spans)))
        if answerable:
            forced = self._means([span.text for span in spans], answerable)
            scores |= {f"answerable_{name}": value for name, value in forced.items()}
        return scores

    def _means(self, answers: Sequence[str], questions: Sequence[int]) -> dict[str, float]:
        def mean(metric: Callable[[str, Sequence[str]], float]) -> float:
            return float(np.mean([metric(answers[i], self._questions[i].golds) for i in questions]))

        return {"f1": mean(overlap_f1), "exact_match": mean(exact_match)}

    def _best_spans(self, reduced: Sequence[ReducedOutput]) -> list[_QuestionSpan]:
        """Select the best span of each question over all its windows."""
        best = [_QuestionSpan("", -np.inf, np.inf) for _ in self._questions]
        for window, row in zip(self._windows, reduced, strict=True):
            span = _WindowSpan(*map(float, row))
            previous = best[window.question]
            text, score = previous.text, previous.score
            if span.score > score:
                start = window.offsets[int(span.start), 0]
                end = window.offsets[int(span.end), 1]
                text = self._questions[window.question].context[start:end]
                score = span.score
            # Windows without the answer have high no-answer scores; the lowest score decides.
            best[window.question] = _QuestionSpan(
                text, score, min(previous.no_answer, span.no_answer)
            )
        return best

    def _reduce(self, index: int, output: Output) -> ReducedOutput:
        window = self._windows[index]
        context = output[window.first : window.first + len(window.offsets)]
        span = find_best_span(context[:, 0], context[:, 1])
        return np.array([*span, output[0].sum()], dtype=np.float32)


def find_best_span(start: NDArray[np.float32], end: NDArray[np.float32]) -> tuple[float, int, int]:
    """Return score, first and last token of the best span of at most MAX_ANSWER_TOKENS tokens.

    Both arrays are [T]. Without tokens the score is -inf.
    """
    best = (-np.inf, 0, 0)
    for distance in range(min(MAX_ANSWER_TOKENS, len(start))):
        sums = start[: len(start) - distance] + end[distance:]
        first = int(sums.argmax())
        if sums[first] > best[0]:
            best = (float(sums[first]), first, first + distance)
    return best
