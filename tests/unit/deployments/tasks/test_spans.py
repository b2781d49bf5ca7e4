from __future__ import annotations

import itertools

import numpy as np
import pytest

from deployments.messages import TokenOffsets
from deployments.tasks.spans import (
    SpanProbabilities,
    Spans,
    compute_span_probabilities,
    find_best_spans,
    find_character_bounds,
)

SPECIAL, QUESTION, CONTEXT = -1, 0, 1


def layout(segments: list[int], words: list[int] | None = None) -> TokenOffsets:
    """Return offsets of tokens of two characters each, by default one word per token."""
    count = len(segments)
    starts = np.arange(0, 2 * count, 2, dtype=np.int32)
    return TokenOffsets(
        text=0,
        offsets=np.stack([starts, starts + 2], axis=1),
        segments=np.array(segments, dtype=np.int8),
        words=np.array(range(count) if words is None else words, dtype=np.int32),
    )


def span_probabilities(start: list[float], end: list[float]) -> SpanProbabilities:
    return SpanProbabilities(np.array(start, np.float32), np.array(end, np.float32), 0.0)


def span_list(spans: Spans) -> list[tuple[int, int, float]]:
    return [
        (first, last, pytest.approx(score))
        for first, last, score in zip(
            spans.first.tolist(), spans.last.tolist(), spans.score.tolist(), strict=True
        )
    ]


def find_by_brute_force(
    probabilities: SpanProbabilities, max_tokens: int, count: int
) -> list[tuple[int, int, float]]:
    pairs = itertools.product(range(len(probabilities.start)), repeat=2)
    products = [
        (first, last, float(probabilities.start[first] * probabilities.end[last]))
        for first, last in pairs
        if first <= last < first + max_tokens
    ]
    return sorted(products, key=lambda span: -span[2])[:count]


def test_softmax_excludes_question_and_closing_tokens() -> None:
    logits = np.array([[0, 0], [50, 50], [50, 50], [0, np.log(3)], [0, 0], [50, 50]], np.float32)
    result = compute_span_probabilities(
        logits, layout([SPECIAL, QUESTION, SPECIAL, CONTEXT, CONTEXT, SPECIAL])
    )
    # Softmax weights of the first and the two context tokens: starts 1, 1, 1; ends 1, 3, 1.
    assert result.start == pytest.approx([1 / 3, 1 / 3])
    assert result.end == pytest.approx([3 / 5, 1 / 5])
    assert result.null == pytest.approx(1 / 3 * 1 / 5)


def test_window_without_first_special_token_has_no_null_answer() -> None:
    result = compute_span_probabilities(
        np.zeros((3, 2), np.float32), layout([QUESTION, CONTEXT, CONTEXT])
    )
    assert result.start == pytest.approx([0.5, 0.5])
    assert result.null == 0


def test_window_without_context_has_null_probability_one() -> None:
    result = compute_span_probabilities(np.zeros((2, 2), np.float32), layout([SPECIAL, QUESTION]))
    assert (len(result.start), len(result.end), result.null) == (0, 0, 1)
    assert span_list(find_best_spans(result, 15, 3)) == []


def test_best_spans_are_ordered_and_within_max_tokens() -> None:
    probabilities = span_probabilities([0.1, 0.1, 0.8, 0.0], [0.7, 0.1, 0.1, 0.1])
    assert span_list(find_best_spans(probabilities, 1, 1)) == [(2, 2, 0.08)]
    probabilities = span_probabilities([0.9, 0.05, 0.05], [0.1, 0.1, 0.8])
    assert span_list(find_best_spans(probabilities, 3, 1)) == [(0, 2, 0.72)]
    assert span_list(find_best_spans(probabilities, 2, 2)) == [(0, 0, 0.09), (0, 1, 0.09)]


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 40, 1_000])
@pytest.mark.parametrize("count", [1, 5, 30, 5_000])
def test_best_spans_equal_brute_force(max_tokens: int, count: int) -> None:
    random = np.random.default_rng(max_tokens * 10_000 + count)
    for tokens in (1, 2, 9, 40):
        probabilities = span_probabilities(
            random.random(tokens).tolist(), random.random(tokens).tolist()
        )
        expected = find_by_brute_force(probabilities, max_tokens, count)
        assert span_list(find_best_spans(probabilities, max_tokens, count)) == expected


def test_spans_with_probability_zero_are_returned() -> None:
    probabilities = span_probabilities([0.0, 1.0], [1.0, 0.0])
    assert sorted(span_list(find_best_spans(probabilities, 5, 9))) == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
    ]


def test_bounds_are_of_tokens_or_whole_words() -> None:
    # Tokens 2 and 3 are one word. Tokens 5 and 6 are not part of a word.
    offsets = layout(
        [SPECIAL, QUESTION, CONTEXT, CONTEXT, CONTEXT, CONTEXT, CONTEXT, SPECIAL],
        words=[-1, 0, 0, 0, 1, -1, -1, -1],
    )
    tokens = [[4, 6], [6, 8], [8, 10], [10, 12], [12, 14]]
    assert find_character_bounds(offsets, whole_words=False).tolist() == tokens
    words = [[4, 8], [4, 8], *tokens[2:]]
    assert find_character_bounds(offsets, whole_words=True).tolist() == words


def test_window_without_context_has_no_bounds() -> None:
    assert len(find_character_bounds(layout([SPECIAL, QUESTION]), whole_words=True)) == 0
