"""A job that keeps several beginnings of its answer, and tells the likeliest when it is done."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deployments.engines.decoder import Logits
from deployments.generation.beams import BeamSearch
from deployments.generation.job import Job, Words, Written
from deployments.generation.messages import (
    Beams,
    Chunk,
    Finished,
    FinishReason,
    GenerationOptions,
    Started,
)
from deployments.generation.sampling import log_total


class BeamJob(Job):
    """Beam search over as many rows as there are beams."""

    def __init__(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        beams: Beams,
        words: Words,
        deadline_s: float,
    ) -> None:
        super().__init__(prompt, words, deadline_s)
        self.width = beams.width
        self._rules = words.rules(options, len(self.prompt))
        self._search = BeamSearch(beams, self._rules.most, words.end_tokens)

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
        ends = bool(ids) and ids[-1] in words.end_tokens
        text: str = words.tokenizer.decode(list(ids), skip_special_tokens=True)
        tokens = tuple(words.told(token, None) for token in ids)
        reason = FinishReason.END if ends else FinishReason.LENGTH
        return Chunk(text, tokens, Finished(reason, len(ids), self.clock.timings()))
