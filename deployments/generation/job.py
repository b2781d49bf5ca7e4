"""One answer being written: from logits to tokens, text, and the reason to stop."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from tokenizers import Tokenizer

from deployments.artifacts.generation_config import EncoderDecoderConfig
from deployments.engines.decoder import Logits
from deployments.generation.grammar import Constraint
from deployments.generation.logits_rules import TokenConstraints
from deployments.generation.messages import (
    Chunk,
    Finished,
    FinishReason,
    GenerationOptions,
    GenerationTimings,
    Started,
    Token,
    TopLogprob,
)
from deployments.generation.prompt_lookup import PromptLookupDrafter
from deployments.generation.sampling import Sampler, log_probabilities
from deployments.generation.stops import StopStrings
from deployments.tokenization.detokenizer import Detokenizer, single

_NUMBERS = count()


@dataclass(slots=True)
class Clock:
    """When what happened to a job, in seconds of time.perf_counter; 0 where it has not yet."""

    submitted_s: float = field(default_factory=time.perf_counter)
    started_s: float = 0.0  # it got a row
    first_s: float = 0.0  # its first token

    def timings(self) -> GenerationTimings:
        """What has passed until now."""
        now_s = time.perf_counter()
        started_s = self.started_s or now_s
        first_s = self.first_s or now_s
        return GenerationTimings(started_s - self.submitted_s, first_s - started_s, now_s - first_s)


class Written(NamedTuple):
    """What a job made of the logits of a step."""

    # For each of the beginnings that go on, which of the former ones it continues. A job that
    # keeps several has a row for each.
    parents: Sequence[int]
    chunk: Chunk | None  # None: nothing to tell yet


class Job(ABC):
    """A call that is ready to be computed. One thread at a time works on it."""

    width: int = 1  # rows it takes
    needs_prompt_logprobs: bool = False  # the logits behind every token of the prompt
    drafter: PromptLookupDrafter | None = None  # guesses what comes next; None: nothing does

    def __init__(self, prompt: Sequence[int], words: ModelContext, deadline_s: float) -> None:
        self.number = next(_NUMBERS)
        self.prompt = list(prompt)
        self.deadline_s = deadline_s
        self.clock = Clock()
        self.unread = len(self.prompt)  # prompt tokens that are not computed
        self.cached = 0  # prompt tokens that somebody computed before
        self.last_tokens: list[int] = []  # of the beginnings; the decoder has not read them yet
        self._words = words

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt is computed."""
        return self.unread == 0

    @property
    def slot_owners(self) -> list[tuple[int, int]]:
        """What its rows are owned by."""
        return [(self.number, slot_owner) for slot_owner in range(self.width)]

    def read(self, tokens: int, logits: Logits) -> None:
        """Note that the next `tokens` of the prompt were computed.

        `logits` are those behind each of them, [T, V], for a job that `needs_prompt_logprobs`.
        """
        self.unread -= tokens

    @abstractmethod
    def started(self, compute_type: str) -> Started:
        """What the answer's reader is told first."""

    @abstractmethod
    def write(self, logits: Logits) -> Written:
        """One token further, [beginnings, V]. Raises ServeError for what cannot go on."""


class SamplingJob(Job):
    """A job that writes one token after the other."""

    def __init__(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        words: ModelContext,
        constraint: Constraint | None,
        deadline_s: float,
    ) -> None:
        super().__init__(prompt, words, deadline_s)
        self.needs_prompt_logprobs = options.prompt_logprobs
        self._options = options
        # What an encoder reads is no beginning of the answer, whose words it may well use.
        before = [words.source.decoder_start_token_id] if words.source else self.prompt
        self._sampler = Sampler(options.sampling, before, words.vocabulary)
        self._constraint = constraint
        self._stops = StopStrings(options.stop, keep=options.include_stop_string)
        self._detokenizer = Detokenizer(words.tokenizer, before)
        self._rules = words.rules(options, len(self.prompt))
        self._tokens: list[int] = []
        self._prompt_tokens: list[Token] = []
        self.drafter = PromptLookupDrafter(self.prompt, self._tokens, self._rules.most)

    def read(self, tokens: int, logits: Logits) -> None:
        """Note that a part of the prompt was computed, and what its tokens were worth."""
        if self.needs_prompt_logprobs:
            done = len(self.prompt) - self.unread
            for place, row in enumerate(logits[: len(self.prompt) - done - 1], start=done + 1):
                token = self.prompt[place]
                logprob, _ = log_probabilities(row, token, 0)
                self._prompt_tokens.append(self._words.told(token, logprob))
        super().read(tokens, logits)

    def started(self, compute_type: str) -> Started:
        """What the answer's reader is told first."""
        told: tuple[Token, ...] = ()
        if self.needs_prompt_logprobs:
            told = (self._words.told(self.prompt[0], None), *self._prompt_tokens)
        return Started(len(self.prompt), self.cached, self._sampler.seed, compute_type, told)

    def write(self, logits: Logits) -> Written:
        """Choose the next token by its logits, [1, V]. Raises EngineFailed for no numbers.

        InvalidField for a grammar that has become too complex.
        """
        return Written((0,), self._chunk(logits[0]))

    def _chunk(self, logits: Logits) -> Chunk:
        is_early = len(self._tokens) < self._rules.fewest
        token = forced = self._rules.forced(self._tokens)
        if token is None:
            token = self._sampler.next(
                logits,
                allowed=None if self._constraint is None else self._constraint.allowed(),
                forbidden=self._rules.forbidden(self._tokens),
            )
        self.last_tokens = [token]
        self._tokens.append(token)
        if len(self._tokens) == 1:
            self.clock.first_s = time.perf_counter()
        is_end = token in self._words.eos_token_ids
        # What every answer begins or ends with is no part of what a grammar speaks of.
        if self._constraint is not None and forced is None and not is_end:
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
        return FinishReason.LENGTH if len(self._tokens) >= self._rules.most else None

    def _finished(self, reason: FinishReason | None) -> Finished | None:
        return None if reason is None else Finished(reason, len(self._tokens), self.clock.timings())

    def _told(self, token: int, added: str, logits: Logits) -> Token:
        special = self._words.is_special(token)
        if self._options.logprobs is None:
            return Token(token, added, special=special)
        logprob, likeliest = log_probabilities(logits, token, self._options.logprobs)
        alternatives = tuple(
            TopLogprob(
                other, single(self._words.tokenizer, other), its, self._words.is_special(other)
            )
            for other, its in likeliest
        )
        return Token(token, added, logprob, special, alternatives)


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What a job must know of its model."""

    tokenizer: Tokenizer
    vocabulary: int  # V
    eos_token_ids: tuple[int, ...]
    special_tokens: frozenset[int]
    context: int  # tokens that a row has room for
    never: tuple[int, ...] = ()  # ids that no answer may have
    source: EncoderDecoderConfig | None = None  # of a model with an encoder

    def is_special(self, token: int) -> bool:
        """Whether a token is none of the text."""
        return token in self.special_tokens or token in self.eos_token_ids

    def told(self, token: int, logprob: float | None) -> Token:
        """A token by itself: of a prompt, or of an answer that is told at once."""
        special = self.is_special(token)
        return Token(token, "" if special else single(self.tokenizer, token), logprob, special)

    def rules(self, options: GenerationOptions, prompt_tokens: int) -> TokenConstraints:
        """What the answer to a prompt must keep to; it is as long as wanted where there is room."""
        left = self.context - (1 if self.source else prompt_tokens)
        wanted = options.max_new_tokens
        rules = TokenConstraints(
            most=left if wanted is None else min(wanted, left),
            fewest=options.min_new_tokens,
            eos_token_ids=self.eos_token_ids,
            never=self.never,
            no_repeat_ngram_size=options.no_repeat_ngram_size,
        )
        if self.source is None:
            return rules
        return replace(
            rules,
            before=(self.source.decoder_start_token_id,),
            forced_bos_token_id=self.source.forced_bos_token_id,
            forced_eos_token_id=self.source.forced_eos_token_id,
        )
