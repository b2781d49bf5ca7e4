"""One answer being written: from logits to tokens, text, and the reason to stop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from tokenizers import Tokenizer

from deployments.encoding.detokenizer import Detokenizer, single
from deployments.engines.decoder import Logits
from deployments.generation.grammar import Constraint
from deployments.generation.messages import (
    Alternative,
    Chunk,
    Finished,
    FinishReason,
    GenerationOptions,
    GenerationTimings,
    Started,
    Token,
)
from deployments.generation.sampling import Sampler, log_probabilities
from deployments.generation.stops import StopStrings

_NUMBERS = count()


@dataclass(slots=True)
class Clock:
    """When what happened to a job, in seconds of time.perf_counter; 0 where it has not yet."""

    asked_s: float = field(default_factory=time.perf_counter)
    begun_s: float = 0.0  # it got a row
    first_s: float = 0.0  # its first token

    def timings(self) -> GenerationTimings:
        """What has passed until now."""
        now_s = time.perf_counter()
        begun_s = self.begun_s or now_s
        first_s = self.first_s or now_s
        return GenerationTimings(begun_s - self.asked_s, first_s - begun_s, now_s - first_s)


class GenerationJob:
    """A call that is ready to be computed. One thread at a time works on it."""

    def __init__(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        words: Words,
        constraint: Constraint | None,
        deadline_s: float,
    ) -> None:
        self.number = next(_NUMBERS)
        self.prompt = list(prompt)
        self.deadline_s = deadline_s
        self.clock = Clock()
        self.unread = len(self.prompt)  # prompt tokens that are not computed
        self.cached = 0  # prompt tokens that somebody computed before
        self.last_token = 0  # of the answer; not read by the decoder yet
        self.wants_prompt = options.prompt_logprobs
        self._options = options
        self._words = words
        self._sampler = Sampler(options.sampling, self.prompt, words.vocabulary)
        self._constraint = constraint
        self._stops = StopStrings(options.stop, keep=options.keep_stop)
        self._detokenizer = Detokenizer(words.tokenizer, self.prompt)
        self._limit = words.most_new(len(self.prompt), options.max_new_tokens)
        self._generated = 0
        self._prompt_tokens: list[Token] = []

    @property
    def is_read(self) -> bool:
        """Whether the whole prompt is computed."""
        return self.unread == 0

    def read(self, tokens: int, logits: Logits) -> None:
        """Note that the next `tokens` of the prompt were computed.

        `logits` are those behind each of them, [T, V], for a job that `wants_prompt`.
        """
        if self.wants_prompt:
            done = len(self.prompt) - self.unread
            for place, row in enumerate(logits[: len(self.prompt) - done - 1], start=done + 1):
                token = self.prompt[place]
                logprob, _ = log_probabilities(row, token, 0)
                self._prompt_tokens.append(self._words.told(token, logprob))
        self.unread -= tokens

    def started(self, compute_type: str) -> Started:
        """What the answer's reader is told first."""
        told: tuple[Token, ...] = ()
        if self.wants_prompt:
            told = (self._words.told(self.prompt[0], None), *self._prompt_tokens)
        return Started(len(self.prompt), self.cached, self._sampler.seed, compute_type, told)

    def write(self, logits: Logits) -> Chunk:
        """Choose the next token by its logits, [V]. Raises EngineFailed for logits of no number."""
        is_early = self._generated < self._options.min_new_tokens
        token = self._sampler.next(
            logits,
            allowed=None if self._constraint is None else self._constraint.allowed(),
            forbidden=self._words.end_tokens if is_early else (),
        )
        self.last_token = token
        self._generated += 1
        if self._generated == 1:
            self.clock.first_s = time.perf_counter()
        is_end = token in self._words.end_tokens
        if self._constraint is not None and not is_end:
            self._constraint.accept(token)
        added = "" if is_end else self._detokenizer.push(token)
        text, is_stopped = (added, False) if is_early else self._stops.push(added)
        reason = self._reason_to_stop(is_end=is_end, is_stopped=is_stopped)
        if reason is not None and not is_stopped:
            text += self._stops.rest()
        return Chunk(text, (self._told(token, added, logits),), self._finished(reason))

    def _reason_to_stop(self, *, is_end: bool, is_stopped: bool) -> FinishReason | None:
        if is_stopped:
            return FinishReason.STOP
        if is_end or (self._constraint is not None and self._constraint.is_over):
            return FinishReason.END
        return FinishReason.LENGTH if self._generated >= self._limit else None

    def _finished(self, reason: FinishReason | None) -> Finished | None:
        return None if reason is None else Finished(reason, self._generated, self.clock.timings())

    def _told(self, token: int, added: str, logits: Logits) -> Token:
        special = self._words.is_special(token)
        if self._options.logprobs is None:
            return Token(token, added, special=special)
        logprob, likeliest = log_probabilities(logits, token, self._options.logprobs)
        alternatives = tuple(
            Alternative(other, single(self._words.tokenizer, other), its)
            for other, its in likeliest
        )
        return Token(token, added, logprob, special, alternatives)


@dataclass(frozen=True, slots=True)
class Words:
    """What a job must know of its model."""

    tokenizer: Tokenizer
    vocabulary: int  # V
    end_tokens: tuple[int, ...]
    special_tokens: frozenset[int]
    context: int  # tokens that a row has room for

    def is_special(self, token: int) -> bool:
        """Whether a token is none of the text."""
        return token in self.special_tokens or token in self.end_tokens

    def told(self, token: int, logprob: float | None) -> Token:
        """A token of a prompt."""
        special = self.is_special(token)
        return Token(token, "" if special else single(self.tokenizer, token), logprob, special)

    def most_new(self, prompt: int, wanted: int | None) -> int:
        """How long an answer may be: as wanted, within what is left of the context."""
        left = self.context - prompt
        return left if wanted is None else min(wanted, left)
