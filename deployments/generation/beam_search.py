"""A job that keeps several beginnings of its answer, and tells the likeliest when it is done."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.engines.decoder import Logits
from deployments.generation.job import Job, ModelContext, Written
from deployments.generation.messages import (
    BeamSearchParams,
    Chunk,
    Finished,
    FinishReason,
    GenerationOptions,
    Started,
)
from deployments.generation.sampling import likeliest, log_total


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

    def __init__(
        self, how: BeamSearchParams, most_tokens: int, eos_token_ids: Collection[int]
    ) -> None:
        """For an answer of `most_tokens` at most, which any of `eos_token_ids` ends."""
        self._how = how
        self._most_tokens = most_tokens
        self._end_tokens = frozenset(eos_token_ids)
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


class BeamSearchJob(Job):
    """Beam search over as many rows as there are beams."""

    def __init__(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        beams: BeamSearchParams,
        words: ModelContext,
        deadline_s: float,
    ) -> None:
        super().__init__(prompt, words, deadline_s)
        self.width = beams.width
        self._rules = words.rules(options, len(self.prompt))
        self._search = BeamSearch(beams, self._rules.most, words.eos_token_ids)

    def started(self, compute_type: str) -> Started:
        """What the answer's reader is told first."""
        return Started(len(self.prompt), self.cached, 0, compute_type)

    def write(self, logits: Logits) -> Written:
        """One token further for every beam, [beams, V]. Raises EngineFailed for no numbers."""
        if not self.clock.first_s:
            self.clock.first_s = time.perf_counter()
        running = self._search.running
        scores = np.stack(
            [self._allowed(row, answer) for row, answer in zip(logits, running, strict=True)]
        )
        steps = self._search.advance(scores)
        self.last_tokens = [step.token for step in steps]
        chunk = self._chunk() if self._search.is_over else None
        return Written([step.parent for step in steps], chunk)

    def _allowed(self, logits: NDArray[np.float32], answer: Sequence[int]) -> NDArray[np.float32]:
        """Log-probabilities of what may follow, [V]; -inf for all that may not."""
        scores: NDArray[np.float32] = logits - np.float32(log_total(logits))
        forced = self._rules.forced(answer)
        if forced is not None:
            scores = np.full_like(scores, -np.inf)
            scores[forced] = 0.0
        elif forbidden := self._rules.forbidden(answer):
            scores[forbidden] = -np.inf
        return scores

    def _chunk(self) -> Chunk:
        ids = self._search.best[0].tokens
        words = self._words
        ends = bool(ids) and ids[-1] in words.eos_token_ids
        text: str = words.tokenizer.decode(list(ids), skip_special_tokens=True)
        tokens = tuple(words.told(token, None) for token in ids)
        reason = FinishReason.END if ends else FinishReason.LENGTH
        return Chunk(text, tokens, Finished(reason, len(ids), self.clock.timings()))
