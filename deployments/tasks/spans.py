"""Logits of starts and ends to spans of a context: the arithmetic of question-answering."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from deployments.messages import TokenOffsets
from deployments.tasks.numbers import softmax

_CONTEXT = 1  # the segment that answers are taken from; the question is segment 0
_SPECIAL = -1


@dataclass(frozen=True, slots=True)
class SpanProbabilities:
    """How likely each of a window's C context tokens is the answer's first and last one.

    The first special token takes part, because models point at it when there is no answer; what
    it takes from the others is theirs no more.
    """

    start: NDArray[np.float32]  # [C]
    end: NDArray[np.float32]  # [C]
    null: float  # that there is no answer in this window


@dataclass(frozen=True, slots=True)
class Spans:
    """K spans of context tokens, best first."""

    first: NDArray[np.int64]  # [K]
    last: NDArray[np.int64]  # [K], inclusive
    score: NDArray[np.float32]  # [K]


def compute_span_probabilities(
    logits: NDArray[np.float32], layout: TokenOffsets
) -> SpanProbabilities:
    """The chances behind the logits [T, 2] of a window, whatever is not context left out."""
    context = layout.segments == _CONTEXT
    judged = context.copy()
    judged[0] |= layout.segments[0] == _SPECIAL
    if not judged.any():
        return SpanProbabilities(logits[:0, 0], logits[:0, 1], 0.0)
    shares = softmax(logits[judged].T)  # [2, 1 + C]
    inside = context[judged]
    null = 0.0 if inside[0] else float(shares[0, 0] * shares[1, 0])
    return SpanProbabilities(shares[0, inside], shares[1, inside], null)


def find_best_spans(chances: SpanProbabilities, most_tokens: int, count: int) -> Spans:
    """The `count` likeliest spans of at most `most_tokens` tokens, or as many as there are.

    Equal ones come in the order of their starts, the shorter first.
    """
    tokens = len(chances.start)
    longest = min(most_tokens, tokens)
    if not longest:
        nothing = np.zeros(0, dtype=np.int64)
        return Spans(nothing, nothing, chances.start)
    # -1 stands behind the last token: no product with it is as good as one of two chances.
    padded = np.concatenate([chances.end, np.full(longest - 1, -1, dtype=np.float32)])
    ends = sliding_window_view(padded, longest)  # [C, longest], a view
    # A span among the best `count` starts at one of the `count` starts whose best span is best.
    starts = _largest(chances.start * ends.max(axis=1), count)
    scores = np.where(ends[starts] < 0, -1, chances.start[starts, None] * ends[starts]).ravel()
    chosen = _largest(scores, min(count, int(np.count_nonzero(scores >= 0))))
    chosen = chosen[np.argsort(-scores[chosen], kind="stable")]
    first = starts[chosen // longest]
    return Spans(first, first + chosen % longest, scores[chosen])


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest values, ascending; of all where there are fewer."""
    if len(values) <= count:
        return np.arange(len(values))
    return np.sort(np.argpartition(-values, count - 1)[:count])


def find_character_bounds(layout: TokenOffsets, *, whole_words: bool) -> NDArray[np.int32]:
    """Where an answer begins and ends [C, 2] that has a context token as its first or last one.

    With `whole_words` these are the bounds of the token's word, as far as it is in the window.
    """
    context = layout.segments == _CONTEXT
    offsets: NDArray[np.int32] = layout.offsets[context]
    words = layout.words[context]
    if not whole_words or not len(offsets):
        return offsets
    # Tokens without a word stand for themselves.
    joined = (words[1:] == words[:-1]) & (words[1:] >= 0)
    heads = np.flatnonzero(np.concatenate([[True], ~joined]))
    tails = np.concatenate([heads[1:], [len(words)]]) - 1
    word = np.cumsum(np.concatenate([[0], ~joined]))
    bounds: NDArray[np.int32] = np.stack([offsets[heads[word], 0], offsets[tails[word], 1]], axis=1)
    return bounds
