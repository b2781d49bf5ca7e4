"""Beam search over log-probabilities that each test states."""

from __future__ import annotations

from math import inf

import numpy as np

from deployments.generation.beam_search import BeamSearch
from deployments.messages import BeamSearchParams

END = 0


def search_of(*rows: list[list[float]], end_tokens: int = 1, **params: object) -> BeamSearch:
    """Return a search of two beams after one step per entry of `rows`, which are [beams, V].

    The first `end_tokens` tokens end an answer, which has at most ten tokens.
    """
    search = BeamSearch(BeamSearchParams(2, **params), 10, range(end_tokens))
    for row in rows:
        search.advance(np.array(row, np.float32))
    return search


def test_beams_continue_although_all_end_tokens_are_likelier() -> None:
    search = search_of([[-1.0, -1.1, -1.2, -2.0, -2.5]], end_tokens=3)
    assert search.running == [(3,), (4,)]


def test_only_an_end_among_the_best_continuations_is_an_answer() -> None:
    search = search_of([[-2.0, -0.5, -1.0]])
    assert [answer.tokens for answer in search.best] == [(1,), (2,)]
    search = search_of([[-0.7, -0.5, -1.0]])
    assert [answer.tokens for answer in search.best] == [(END,)]


def test_forbidden_tokens_continue_no_beam() -> None:
    search = search_of([[-inf, -inf, -0.1]])
    assert search.running == [(2,)]
    search.advance(np.full((1, 3), -inf, np.float32))
    assert search.is_over


def test_search_continues_while_a_beam_may_beat_the_worst_answer() -> None:
    """A length penalty below 0 favors short answers: a beam is at its best if it ends now."""
    steps = [[-1.0, -0.5, -2.0]], [[-0.15, -0.1, -9.0], [-9.0, -9.0, -9.0]]
    search = search_of(*steps, length_penalty=-1.0, early_stopping="never")
    assert [answer.tokens for answer in search.best] == [(END,), (1, END)]
    assert not search.is_over, "the score is -1.2, that of the second answer -1.3"
    search.advance(np.array([[-9.0, -0.1, -9.0], [-9.0, -9.0, -9.0]], np.float32))
    assert search.is_over
