"""Beam search: several beginnings of an answer kept side by side. Pure.

The rules are those of transformers' `generate` (version 5): of the continuations of all beams the
best are looked at, twice as many as there are beams or more, so that enough of them go on; those
that end count only among the first, by their log-probability over length ** length_penalty.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.generation.messages import Beams
from deployments.generation.sampling import likeliest


class Step(NamedTuple):
    """How a beam goes on: which former beam it continues, and with which token."""

    parent: int
    token: int


class Hypothesis(NamedTuple):
    """A finished answer."""

    score: float  # log-probability over length ** length_penalty
    tokens: tuple[int, ...]  # the end token included, where there is one


class _Beam(NamedTuple):
    score: float = 0.0  # log-probability
    tokens: tuple[int, ...] = ()


class _Candidate(NamedTuple):
    score: float
    parent: int
    token: int
    ends: bool


class BeamSearch:
    """One search. It starts with a single beam, which has no tokens."""

    def __init__(self, how: Beams, most_tokens: int, end_tokens: Collection[int]) -> None:
        """For an answer of `most_tokens` at most, which any of `end_tokens` ends."""
        self._how = how
        self._most_tokens = most_tokens
        self._end_tokens = frozenset(end_tokens)
        self._beams = [_Beam()]
        self._finished: list[Hypothesis] = []
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether nothing can get better."""
        return self._is_over

    @property
    def running(self) -> list[tuple[int, ...]]:
        """The tokens of the beams that go on, the likeliest first."""
        return [beam.tokens for beam in self._beams]

    @property
    def best(self) -> list[Hypothesis]:
        """The answers found, best first; those that run where none has finished."""
        if self._finished:
            return self._finished
        return [Hypothesis(self._normalised(b.score, len(b.tokens)), b.tokens) for b in self._beams]

    def advance(self, log_probabilities: NDArray[np.float32]) -> list[Step]:
        """One token further; what is forbidden has -inf. [beams, V]: row i follows beam i."""
        length = len(self._beams[0].tokens) + 1
        candidates = self._candidates(log_probabilities, is_last=length >= self._most_tokens)
        self._finish(candidates[: self._how.width], length)
        going_on = [c for c in candidates if not c.ends][: self._how.width]
        if going_on:
            self._beams = [
                _Beam(c.score, (*self._beams[c.parent].tokens, c.token)) for c in going_on
            ]
        self._is_over = not going_on or self._is_enough(length)
        return [Step(c.parent, c.token) for c in going_on]

    def _candidates(
        self, log_probabilities: NDArray[np.float32], *, is_last: bool
    ) -> list[_Candidate]:
        """The best continuations of all beams, best first; all of them end with the last token."""
        count = max(2, 1 + len(self._end_tokens)) * self._how.width
        before = np.array([beam.score for beam in self._beams], np.float32)
        scores = log_probabilities + before[:, None]
        vocabulary = scores.shape[1]
        places = likeliest(scores.ravel(), min(count, scores.size))
        return [
            _Candidate(
                float(scores[parent, token]), parent, token, is_last or token in self._end_tokens
            )
            for parent, token in (divmod(int(place), vocabulary) for place in places)
            if np.isfinite(scores[parent, token])
        ]

    def _finish(self, first: Sequence[_Candidate], length: int) -> None:
        ended = [
            Hypothesis(
                self._normalised(candidate.score, length),
                (*self._beams[candidate.parent].tokens, candidate.token),
            )
            for candidate in first
            if candidate.ends
        ]
        best = sorted([*self._finished, *ended], key=lambda one: -one.score)
        self._finished = best[: self._how.width]

    def _is_enough(self, length: int) -> bool:
        how = self._how
        if len(self._finished) < how.width:
            return False
        if how.early_stopping is True:
            return True
        to_the_end = how.early_stopping == "never" and how.length_penalty > 0
        hoped = self._normalised(self._beams[0].score, self._most_tokens if to_the_end else length)
        return hoped <= self._finished[-1].score

    def _normalised(self, score: float, length: int) -> float:
        return float(score / max(length, 1) ** self._how.length_penalty)
