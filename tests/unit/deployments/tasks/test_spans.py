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
    """Tokens of two characters each, one word per token unless told otherwise."""
    count = len(segments)
    starts = np.arange(0, 2 * count, 2, dtype=np.int32)
    return TokenOffsets(
        text=0,
        offsets=np.stack([starts, starts + 2], axis=1),
        segments=np.array(segments, dtype=np.int8),
        words=np.array(range(count) if words is None else words, dtype=np.int32),
    )


def chances(start: list[float], end: list[float]) -> SpanProbabilities:
    return SpanProbabilities(np.array(start, np.float32), np.array(end, np.float32), 0.0)


def told(spans: Spans) -> list[tuple[int, int, float]]:
    return [
        (first, last, pytest.approx(score))
        for first, last, score in zip(
            spans.first.tolist(), spans.last.tolist(), spans.score.tolist(), strict=True
        )
    ]


def by_brute_force(given: SpanProbabilities, most: int, count: int) -> list[tuple[int, int, float]]:
    pairs = itertools.product(range(len(given.start)), repeat=2)
    products = [
        (first, last, float(given.start[first] * given.end[last]))
        for first, last in pairs
        if first <= last < first + most
    ]
    return sorted(products, key=lambda span: -span[2])[:count]


def test_question_and_closing_tokens_take_no_part_in_the_softmax() -> None:
    logits = np.array([[0, 0], [50, 50], [50, 50], [0, np.log(3)], [0, 0], [50, 50]], np.float32)
    found = compute_span_probabilities(
        logits, layout([SPECIAL, QUESTION, SPECIAL, CONTEXT, CONTEXT, SPECIAL])
    )
    # Left are the first token and the context: 1 : 1 : 1 for starts, 1 : 3 : 1 for ends.
    assert found.start == pytest.approx([1 / 3, 1 / 3])
    assert found.end == pytest.approx([3 / 5, 1 / 5])
    assert found.null == pytest.approx(1 / 3 * 1 / 5)


def test_a_window_that_begins_with_text_has_no_null_answer() -> None:
    found = compute_span_probabilities(
        np.zeros((3, 2), np.float32), layout([QUESTION, CONTEXT, CONTEXT])
    )
    assert found.start == pytest.approx([0.5, 0.5])
    assert found.null == 0


def test_a_window_without_context_is_sure_of_the_null_answer() -> None:
    found = compute_span_probabilities(np.zeros((2, 2), np.float32), layout([SPECIAL, QUESTION]))
    assert (len(found.start), len(found.end), found.null) == (0, 0, 1)
    assert told(find_best_spans(found, 15, 3)) == []


def test_an_answer_ends_after_it_begins_and_is_not_too_long() -> None:
    given = chances([0.1, 0.1, 0.8, 0.0], [0.7, 0.1, 0.1, 0.1])
    assert told(find_best_spans(given, 1, 1)) == [(2, 2, 0.08)]
    given = chances([0.9, 0.05, 0.05], [0.1, 0.1, 0.8])
    assert told(find_best_spans(given, 3, 1)) == [(0, 2, 0.72)]
    assert told(find_best_spans(given, 2, 2)) == [(0, 0, 0.09), (0, 1, 0.09)]


@pytest.mark.parametrize("most", [1, 2, 7, 40, 1_000])
@pytest.mark.parametrize("count", [1, 5, 30, 5_000])
def test_the_best_spans_are_those_that_trying_all_of_them_finds(most: int, count: int) -> None:
    random = np.random.default_rng(most * 10_000 + count)
    for tokens in (1, 2, 9, 40):
        given = chances(random.random(tokens).tolist(), random.random(tokens).tolist())
        expected = by_brute_force(given, most, count)
        assert told(find_best_spans(given, most, count)) == expected


def test_spans_of_no_chance_at_all_are_still_spans() -> None:
    given = chances([0.0, 1.0], [1.0, 0.0])
    assert sorted(told(find_best_spans(given, 5, 9))) == [(0, 0, 0), (0, 1, 0), (1, 1, 0)]


def test_bounds_are_the_tokens_own_unless_whole_words_are_asked_for() -> None:
    # Tokens 2 and 3 are one word; two tokens without a word, 5 and 6, are not one together.
    given = layout(
        [SPECIAL, QUESTION, CONTEXT, CONTEXT, CONTEXT, CONTEXT, CONTEXT, SPECIAL],
        words=[-1, 0, 0, 0, 1, -1, -1, -1],
    )
    tokens = [[4, 6], [6, 8], [8, 10], [10, 12], [12, 14]]
    assert find_character_bounds(given, whole_words=False).tolist() == tokens
    words = [[4, 8], [4, 8], *tokens[2:]]
    assert find_character_bounds(given, whole_words=True).tolist() == words


def test_a_window_without_context_has_no_bounds() -> None:
    assert len(find_character_bounds(layout([SPECIAL, QUESTION]), whole_words=True)) == 0
