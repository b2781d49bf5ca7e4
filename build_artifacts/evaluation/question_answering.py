"""question-answering: is the span a model finds the answer people gave?"""

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
from build_artifacts.evaluation.squad import SquadQuestion, exact_match, overlap_f1, read_questions
from deployments.messages import TokenizedItem, TokenOffsets, Truncation
from deployments.tasks.question_answering import build_question_windowing
from deployments.tokenization.windows import WindowTokenizer

MAX_ANSWER_TOKENS = 30


@dataclass(frozen=True, slots=True)
class QuestionWindow:
    """Which question an item asks, and which of its tokens are context."""

    question: int
    first: int  # index of the first context token
    offsets: NDArray[np.int32]  # [context tokens, 2], each token's characters in the context


class _WindowSpan(NamedTuple):
    """A window's best span. Also what is kept of an answer, as four numbers."""

    score: float
    start: float  # context tokens, counted from the window's first
    end: float  # the last one
    no_answer: float  # score of the span that means "no answer here": the first token alone


class _QuestionSpan(NamedTuple):
    """A question's best span over all its windows."""

    text: str
    score: float
    no_answer: float


def load_question_answering(
    path: Path, model: EvaluatedModel, sampling: ExampleSampling
) -> Evaluation:
    """The questions of the file in windows as they are served. Raises BadEvaluationData."""
    questions = sampling.of(read_questions(path))
    encoder = WindowTokenizer(model.directory, model.max_tokens)
    windowing = build_question_windowing(model.max_tokens)
    items: list[TokenizedItem] = []
    windows: list[QuestionWindow] = []
    for i, question_record in enumerate(questions):
        pair = (question_record.question, question_record.context)
        found, _ = encoder.windows(pair, i, windowing, Truncation.REFUSE)
        items += [item for item, _ in found]
        windows += [_window(layout) for _, layout in found]
    return QuestionAnsweringEvaluation(items, windows, questions)


def _window(layout: TokenOffsets) -> QuestionWindow:
    context = np.flatnonzero(layout.segments == 1)
    return QuestionWindow(
        layout.text, int(context[0]) if len(context) else 0, layout.offsets[context]
    )


class QuestionAnsweringEvaluation(Evaluation):
    """SQuAD's `f1` decides, `exact_match` goes with it.

    Where some questions have no answer, a model answers nothing when its no-answer score beats
    its best span. `answerable_f1` and `answerable_exact_match` then say how it does on the other
    questions when it must answer.
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
        """`f1` and `exact_match`, means over the questions."""
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

    def _means(self, answers: Sequence[str], chosen: Sequence[int]) -> dict[str, float]:
        def mean(judge: Callable[[str, Sequence[str]], float]) -> float:
            return float(np.mean([judge(answers[i], self._questions[i].golds) for i in chosen]))

        return {"f1": mean(overlap_f1), "exact_match": mean(exact_match)}

    def _best_spans(self, reduced: Sequence[ReducedOutput]) -> list[_QuestionSpan]:
        """The best span of each question over all its windows."""
        best = [_QuestionSpan("", -np.inf, np.inf) for _ in self._questions]
        for window, row in zip(self._windows, reduced, strict=True):
            found = _WindowSpan(*map(float, row))
            before = best[window.question]
            text, score = before.text, before.score
            if found.score > score:
                start = window.offsets[int(found.start), 0]
                end = window.offsets[int(found.end), 1]
                text = self._questions[window.question].context[start:end]
                score = found.score
            # A window that does not hold the answer rightly says so; the least sure one counts.
            best[window.question] = _QuestionSpan(
                text, score, min(before.no_answer, found.no_answer)
            )
        return best

    def _reduce(self, index: int, answer: Output) -> ReducedOutput:
        window = self._windows[index]
        context = answer[window.first : window.first + len(window.offsets)]
        found = best_span(context[:, 0], context[:, 1])
        return np.array([*found, answer[0].sum()], dtype=np.float32)


def best_span(start: NDArray[np.float32], end: NDArray[np.float32]) -> tuple[float, int, int]:
    """Score, first and last token of the best span of at most MAX_ANSWER_TOKENS; both are [T].

    Without tokens the score is -inf.
    """
    best = (-np.inf, 0, 0)
    for longer in range(min(MAX_ANSWER_TOKENS, len(start))):
        sums = start[: len(start) - longer] + end[longer:]
        first = int(sums.argmax())
        if sums[first] > best[0]:
            best = (float(sums[first]), first, first + longer)
    return best
