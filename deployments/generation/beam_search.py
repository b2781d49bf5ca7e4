"""Beam search: the search itself and the job that runs it over several KV slots."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.engines.decoder import Logits
from deployments.generation.job import Job, JobStep, ModelContext
from deployments.generation.logits_rules import MAX_ABS_LOGIT
from deployments.generation.sampling import log_total
from deployments.messages import (
    BeamSearchParams,
    Chunk,
    Finished,
    FinishReason,
    GenerationOptions,
    Started,
    Token,
)
from deployments.tokenization.detokenizer import Detokenizer
from deployments.top_indices import top_indices


class BeamStep(NamedTuple):
    """Continuation of a beam: the index of the extended beam, and the added token."""

    parent: int
    token: int


class Hypothesis(NamedTuple):
    """A finished answer, or a running beam that is scored as if it were finished."""

    score: float  # log-probability / length ** length_penalty
    tokens: tuple[int, ...]  # including the end token, if there is one


class _Beam(NamedTuple):
    score: float = 0.0  # log-probability
    tokens: tuple[int, ...] = ()


class _Continuation(NamedTuple):
    score: float
    parent: int
    token: int
    is_end: bool


class BeamSearch:
    """One beam search. It starts with a single empty beam."""

    def __init__(
        self, params: BeamSearchParams, max_new_tokens: int, eos_token_ids: Collection[int]
    ) -> None:
        self._params = params
        self._max_new_tokens = max_new_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._beams = [_Beam()]
        self._finished: list[Hypothesis] = []  # best first, at most `num_beams`
        self._is_over = False

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def running(self) -> list[tuple[int, ...]]:
        """The tokens of the running beams, most likely beam first."""
        return [beam.tokens for beam in self._beams]

    @property
    def best(self) -> list[Hypothesis]:
        """Finished answers, best first; the running beams if none has finished."""
        if self._finished:
            return self._finished
        return [Hypothesis(self._normalize(b.score, len(b.tokens)), b.tokens) for b in self._beams]

    def advance(self, log_probabilities: NDArray[np.float32]) -> list[BeamStep]:
        """Extend the beams by one token. Return one step for each beam that continues.

        `log_probabilities` are [beams, V], row i for beam i; forbidden tokens have -inf.
        """
        length = len(self._beams[0].tokens) + 1
        is_last = length >= self._max_new_tokens
        candidates = self._find_continuations(log_probabilities, is_last=is_last)
        self._finish(candidates[: self._params.num_beams], length)
        running = [c for c in candidates if not c.is_end][: self._params.num_beams]
        if running:
            self._beams = [
                _Beam(c.score, (*self._beams[c.parent].tokens, c.token)) for c in running
            ]
        self._is_over = not running or self._can_stop(length)
        return [BeamStep(c.parent, c.token) for c in running]

    def _find_continuations(
        self, log_probabilities: NDArray[np.float32], *, is_last: bool
    ) -> list[_Continuation]:
        """Return the best continuations of all beams, best first; with `is_last` all of them end.

        Returns enough for `num_beams` beams to continue, even if the end tokens of all beams are
        among the best.
        """
        count = max(2, 1 + len(self._eos_token_ids)) * self._params.num_beams
        before = np.array([beam.score for beam in self._beams], np.float32)
        scores = log_probabilities + before[:, None]
        vocabulary = scores.shape[1]
        indices = top_indices(scores.ravel(), min(count, scores.size))
        return [
            _Continuation(
                float(scores[parent, token]),
                parent,
                token,
                is_last or token in self._eos_token_ids,
            )
            for parent, token in (divmod(int(index), vocabulary) for index in indices)
            if np.isfinite(scores[parent, token])
        ]

    def _finish(self, candidates: Sequence[_Continuation], length: int) -> None:
        ended = [
            Hypothesis(
                self._normalize(candidate.score, length),
                (*self._beams[candidate.parent].tokens, candidate.token),
            )
            for candidate in candidates
            if candidate.is_end
        ]
        best = sorted([*self._finished, *ended], key=lambda hypothesis: -hypothesis.score)
        self._finished = best[: self._params.num_beams]

    def _can_stop(self, length: int) -> bool:
        params = self._params
        if len(self._finished) < params.num_beams:
            return False
        if params.early_stopping is True:
            return True
        # Log-probabilities are negative. With a positive length penalty, the maximum length
        # therefore gives the best possible score.
        use_max_length = params.early_stopping == "never" and params.length_penalty > 0
        bound = self._normalize(
            self._beams[0].score, self._max_new_tokens if use_max_length else length
        )
        return bound <= self._finished[-1].score

    def _normalize(self, score: float, length: int) -> float:
        return float(score / max(length, 1) ** self._params.length_penalty)


class BeamSearchJob(Job):
    """Beam search with one KV slot per beam. Emits the best answer as a single chunk."""

    def __init__(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        params: BeamSearchParams,
        model: ModelContext,
        deadline_s: float,
    ) -> None:
        super().__init__(prompt, options, model, deadline_s)
        self.slot_count = params.num_beams
        self._repetition_penalty = options.sampling.repetition_penalty
        self._search = BeamSearch(params, self._constraints.max_new_tokens, model.eos_token_ids)

    @property
    def generated_tokens(self) -> int:
        return len(self._search.running[0])

    def build_started(self, compute_type: str) -> Started:
        return Started(len(self.prompt), self.cached_tokens, 0, compute_type)

    def accept_logits(self, logits: Logits) -> JobStep:
        """Extend all beams from logits [beams, V].

        Raises EngineFailed if the highest logit of a beam is NaN or infinite.
        """
        if not self.times.first_token_s:
            self.times.first_token_s = time.perf_counter()
        scores = np.stack(
            [
                self._constrain(row, answer)
                for row, answer in zip(logits, self._search.running, strict=True)
            ]
        )
        steps = self._search.advance(scores)
        self.last_tokens = [step.token for step in steps]
        chunk = self._build_chunk() if self._search.is_over else None
        return JobStep([step.parent for step in steps], chunk)

    def _constrain(self, logits: NDArray[np.float32], answer: Sequence[int]) -> NDArray[np.float32]:
        """Return the scores [V] of the next token; -inf for forbidden tokens.

        Scores are log-probabilities after the repetition penalty. A forced token has the score 0.
        """
        scores: NDArray[np.float32] = logits - np.float32(log_total(logits))
        forced = self._constraints.find_forced(answer)
        if forced is not None:
            scores = np.full_like(scores, -np.inf)
            scores[forced] = 0.0
            return scores
        if self._repetition_penalty != 1:
            tokens = [*self._constraints.prefix, *answer]
            penalized = scores[tokens].astype(np.float64) * self._repetition_penalty
            scores[tokens] = np.maximum(penalized, -MAX_ABS_LOGIT)
        if forbidden := self._constraints.find_forbidden(answer):
            scores[forbidden] = -np.inf
        return scores

    def _build_chunk(self) -> Chunk:
        ids = self._search.best[0].tokens
        model = self._model
        is_end = bool(ids) and ids[-1] in model.eos_token_ids
        text: str = model.tokenizer.decode(list(ids), skip_special_tokens=True)
        detokenizer = Detokenizer(model.tokenizer)
        tokens = tuple(
            Token(token, "", special=True)
            if model.is_special(token)
            else Token(token, detokenizer.push(token))
            for token in ids
        )
        reason = FinishReason.END if is_end else FinishReason.LENGTH
        return Chunk(text, tokens, Finished(reason, len(ids), self.times.timings()))
