"""Converts start and end logits to spans of a context, for question-answering."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from deployments.messages import TokenOffsets
from deployments.tasks.numbers import softmax

_CONTEXT = 1  # segment of the context; the question is segment 0
_SPECIAL = -1


@dataclass(frozen=True, slots=True)
class SpanProbabilities:
    """Probabilities that each of a window's C context tokens starts or ends the answer.

    The softmax includes the first token of the window if it is special. Models select this token if
    there is no answer.
    """

    start: NDArray[np.float32]  # [C]
    end: NDArray[np.float32]  # [C]
    null: float  # probability that this window has no answer; 0 if its first token is not special


@dataclass(frozen=True, slots=True)
class Spans:
    """K spans of context tokens, best first."""

    first: NDArray[np.int64]  # [K]
    last: NDArray[np.int64]  # [K], inclusive
    score: NDArray[np.float32]  # [K]


def compute_span_probabilities(
    logits: NDArray[np.float32], layout: TokenOffsets
) -> SpanProbabilities:
    """Apply softmax to the logits [T, 2] of a window.

    The softmax covers the context tokens, and the first token of the window if it is special.
    """
    context = layout.segments == _CONTEXT
    included = context.copy()
    included[0] |= layout.segments[0] == _SPECIAL
    if not included.any():
        return SpanProbabilities(logits[:0, 0], logits[:0, 1], 0.0)
    values = softmax(logits[included].T)  # [2, 1 + C]
    inside = context[included]
    null = 0.0 if inside[0] else float(values[0, 0] * values[1, 0])
    return SpanProbabilities(values[0, inside], values[1, inside], null)


def find_best_spans(probabilities: SpanProbabilities, max_tokens: int, count: int) -> Spans:
    """Return up to `count` most likely spans of at most `max_tokens` tokens.

    Equal scores are ordered by start, then by length.
    """
    tokens = len(probabilities.start)
    max_length = min(max_tokens, tokens)
    if not max_length:
        empty = np.zeros(0, dtype=np.int64)
        return Spans(empty, empty, probabilities.start)
    # Pad `end` with -1, which marks spans that end after the last token. These spans get the score
    # -1 below and are never returned. The product `start` * -1 cannot mark them: it may be 0.
    padded = np.concatenate([probabilities.end, np.full(max_length - 1, -1, dtype=np.float32)])
    ends = sliding_window_view(padded, max_length)  # [C, max_length], a view
    # Only the `count` start tokens whose best spans score highest can start one of the best spans.
    starts = _largest(probabilities.start * ends.max(axis=1), count)
    scores = np.where(
        ends[starts] < 0, -1, probabilities.start[starts, None] * ends[starts]
    ).ravel()
    best = _largest(scores, min(count, int(np.count_nonzero(scores >= 0))))
    best = best[np.argsort(-scores[best], kind="stable")]
    first = starts[best // max_length]
    return Spans(first, first + best % max_length, scores[best])


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the indices of the `count` largest values in ascending order."""
    if len(values) <= count:
        return np.arange(len(values))
    return np.sort(np.argpartition(-values, count - 1)[:count])


def find_character_bounds(layout: TokenOffsets, *, whole_words: bool) -> NDArray[np.int32]:
    """Return the character range [C, 2] of each context token.

    With `whole_words` return the range of the token's word, as far as the window contains the word.
    """
    context = layout.segments == _CONTEXT
    offsets: NDArray[np.int32] = layout.offsets[context]
    words = layout.words[context]
    if not whole_words or not len(offsets):
        return offsets
    # A token that belongs to no word (index -1) counts as a separate word.
    continues = (words[1:] == words[:-1]) & (words[1:] >= 0)
    heads = np.flatnonzero(np.concatenate([[True], ~continues]))
    tails = np.concatenate([heads[1:], [len(words)]]) - 1
    word = np.cumsum(np.concatenate([[0], ~continues]))
    bounds: NDArray[np.int32] = np.stack([offsets[heads[word], 0], offsets[tails[word], 1]], axis=1)
    return bounds
