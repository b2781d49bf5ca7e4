"""Generation of one answer: from logits to tokens, text and the finish reason."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deployments.artifacts.generation_config import EncoderDecoderConfig
from deployments.engines.decoder import Logits
from deployments.generation.grammar import Constraint
from deployments.generation.logits_rules import TokenConstraints
from deployments.generation.prompt_lookup import PromptLookupDrafter
from deployments.generation.reasoning import AnswerSplitter
from deployments.generation.sampling import Sampler, log_probabilities
from deployments.generation.stops import StopStrings
from deployments.messages import (
    Chunk,
    Finished,
    FinishReason,
    GenerationOptions,
    GenerationTimings,
    Started,
    Token,
    TopLogprob,
)
from deployments.tokenization.detokenizer import Detokenizer, token_text

_NUMBERS = count()


@dataclass(slots=True)
class JobTimes:
    """Times of the events of a job, in seconds of time.perf_counter; 0 before the event."""

    tokenize_s: float = 0.0  # a duration, before submission
    submitted_s: float = field(default_factory=time.perf_counter)
    started_s: float = 0.0  # assignment of KV slots
    first_token_s: float = 0.0

    def timings(self) -> GenerationTimings:
        """Return the durations of the phases until now."""
        now_s = time.perf_counter()
        started_s = self.started_s or now_s
        first_token_s = self.first_token_s or now_s
        return GenerationTimings(
            queue_s=started_s - self.submitted_s,
            prefill_s=first_token_s - started_s,
            decode_s=now_s - first_token_s,
            tokenize_s=self.tokenize_s,
        )


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Properties of a model that all of its jobs share."""

    tokenizer: Tokenizer
    vocabulary: int  # V, the width of the logits
    eos_token_ids: tuple[int, ...]
    special_tokens: frozenset[int]
    context: int  # tokens per KV slot
    call_marks: Mapping[int, str] = field(default_factory=dict)  # text of marks of tool calls
    suppressed: tuple[int, ...] = ()  # ids that no answer contains
    encoder_decoder: EncoderDecoderConfig | None = None

    def is_special(self, token: int) -> bool:
        return token in self.special_tokens or token in self.eos_token_ids

    def find_stop_tokens(self, stop: Iterable[str], marks: Sequence[int] = ()) -> dict[int, str]:
        """Return the stop strings that are special tokens or `marks`, not end tokens, by id."""
        omitted = self.special_tokens.union(marks).difference(self.eos_token_ids)
        tokens = {self.tokenizer.token_to_id(string): string for string in stop}
        return {token: string for token, string in tokens.items() if token in omitted}

    def build_constraints(self, options: GenerationOptions, prompt_tokens: int) -> TokenConstraints:
        """Build the token constraints of one answer.

        The slot of an encoder-decoder model holds the start token and the answer, not the prompt.
        """
        available = self.context - (1 if self.encoder_decoder else prompt_tokens)
        requested = options.max_new_tokens
        constraints = TokenConstraints(
            max_new_tokens=available if requested is None else min(requested, available),
            min_new_tokens=options.min_new_tokens,
            eos_token_ids=self.eos_token_ids,
            suppressed=self.suppressed,
            no_repeat_ngram_size=options.no_repeat_ngram_size,
        )
        if self.encoder_decoder is None:
            return constraints
        first_token = self.encoder_decoder.forced_bos_token_id
        return replace(
            constraints,
            prefix=(self.encoder_decoder.decoder_start_token_id,),
            forced_bos_token_id=options.languages.target if options.languages else first_token,
            forced_eos_token_id=self.encoder_decoder.forced_eos_token_id,
        )


class Demand(NamedTuple):
    """Size, progress, deadline and client of a job, for predictions and the queue."""

    min_new_tokens: int
    max_new_tokens: int
    slots: int
    deadline_s: float  # time.monotonic
    prompt_tokens: int = 0  # still to prefill; 0 until the prompt is tokenized
    generated_tokens: int = 0
    client: str = ""
    priority: int = 0


class JobStep(NamedTuple):
    """Result of one decode step of a job."""

    # For each sequence that continues, the index of the sequence that it extends. A job has one KV
    # slot per sequence.
    parents: Sequence[int]
    chunk: Chunk | None  # None: no output yet


class Job(ABC):
    """The generation of one answer, after its prompt is tokenized. Not thread-safe."""

    slot_count: int = 1
    needs_prompt_logprobs: bool = False  # if True, prefill returns logits of every prompt token
    drafter: PromptLookupDrafter | None = None  # None: no speculative decoding
    client: str = ""  # identifies the client: the queue is fair between clients
    priority: int = 0  # index in PRIORITIES; 0 is the highest priority
    ignores_tools: bool = False  # see `Started`

    def __init__(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        model: ModelContext,
        deadline_s: float,
    ) -> None:
        self.number = next(_NUMBERS)
        self.prompt = list(prompt)
        self.prefix_cache_scope = options.prefix_cache_scope
        self.deadline_s = deadline_s
        self._constraints = model.build_constraints(options, len(self.prompt))
        self.times = JobTimes()
        self.remaining_prompt_tokens = len(self.prompt)
        self.cached_tokens = 0  # prompt tokens from the prefix cache
        # The last token of each sequence. The decoder receives them in the next decode step.
        self.last_tokens: list[int] = []
        self._model = model

    @property
    def is_prefilled(self) -> bool:
        return self.remaining_prompt_tokens == 0

    @property
    @abstractmethod
    def generated_tokens(self) -> int:
        """Number of tokens of the answer so far; with several sequences, of each sequence."""

    @property
    def demand(self) -> Demand:
        return Demand(
            prompt_tokens=self.remaining_prompt_tokens,
            min_new_tokens=self._constraints.min_new_tokens,
            max_new_tokens=self._constraints.max_new_tokens,
            generated_tokens=self.generated_tokens,
            slots=self.slot_count,
            deadline_s=self.deadline_s,
            client=self.client,
            priority=self.priority,
        )

    @property
    def slot_owners(self) -> list[tuple[int, int]]:
        """Keys that identify the KV slots of this job in the slot table."""
        return [(self.number, index) for index in range(self.slot_count)]

    def accept_prompt_chunk(self, tokens: int, logits: Logits) -> None:
        """Record that the next `tokens` prompt tokens are prefilled.

        With `needs_prompt_logprobs`, `logits` are [tokens, V]; otherwise they are ignored.
        """
        self.remaining_prompt_tokens -= tokens

    @abstractmethod
    def build_started(self, compute_type: str) -> Started: ...

    @abstractmethod
    def accept_logits(self, logits: Logits) -> JobStep:
        """Choose the next token of each sequence from logits [sequences, V].

        Raises ServeError if the job cannot continue.
        """


class SamplingJob(Job):
    """A job with one sequence, extended token by token."""

    def __init__(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        model: ModelContext,
        constraint: Constraint | None,
        deadline_s: float,
        reasoning: AnswerSplitter | None = None,
    ) -> None:
        """Start an answer. With `reasoning`, `constraint` applies to the text after it."""
        super().__init__(prompt, options, model, deadline_s)
        self.needs_prompt_logprobs = options.prompt_logprobs
        self._options = options
        # In encoder-decoder models, the answer does not continue the prompt. Penalties therefore
        # ignore the prompt tokens.
        prefix = (
            [model.encoder_decoder.decoder_start_token_id] if model.encoder_decoder else self.prompt
        )
        self._sampler = Sampler(options.sampling, prefix, model.vocabulary)
        self._constraint = constraint
        self._reasoning = reasoning
        self._stops = StopStrings(options.stop, include_stop_string=options.include_stop_string)
        # The text of an answer omits special tokens and marks, so `_stops` cannot find them.
        marks = () if reasoning is None else reasoning.mark_ids
        self._stop_tokens = model.find_stop_tokens(options.stop, marks)
        # With `prompt_logprobs`, the detokenizer receives the prompt tokens later, one by one.
        self._detokenizer = Detokenizer(model.tokenizer, () if options.prompt_logprobs else prefix)
        self._tokens: list[int] = []
        self._prompt_tokens: list[Token] = []
        self.drafter = PromptLookupDrafter(
            self.prompt, self._tokens, self._constraints.max_new_tokens
        )

    @property
    def generated_tokens(self) -> int:
        return len(self._tokens)

    def accept_prompt_chunk(self, tokens: int, logits: Logits) -> None:
        if self.needs_prompt_logprobs:
            done = len(self.prompt) - self.remaining_prompt_tokens
            if done == 0:
                self._accept_prompt_token(self.prompt[0], None)
            # Row i of the logits predicts the prompt token at index done + i + 1.
            for index, row in enumerate(logits[: len(self.prompt) - done - 1], start=done + 1):
                self._accept_prompt_token(self.prompt[index], row)
        super().accept_prompt_chunk(tokens, logits)

    def _accept_prompt_token(self, token: int, logits: Logits | None) -> None:
        added = self._detokenizer.push(token)
        if self._model.is_special(token):  # the text of a prompt has the names of its tokens
            added = token_text(self._model.tokenizer, token)
        self._prompt_tokens.append(self._build_token(token, added, logits))

    def build_started(self, compute_type: str) -> Started:
        return Started(
            len(self.prompt),
            self.cached_tokens,
            self._sampler.seed,
            compute_type,
            tuple(self._prompt_tokens),
            self.ignores_tools,
        )

    def accept_logits(self, logits: Logits) -> JobStep:
        """Choose the next token from logits [1, V].

        Raises EngineFailed if the highest logit is NaN or infinite. Raises InvalidField if the
        grammar became too complex, or if the TokenConstraints forbid every token that it allows.
        """
        return JobStep((0,), self._build_chunk(logits[0]))

    def _build_chunk(self, logits: Logits) -> Chunk | None:
        """Return the chunk of the next token; None if it is held back."""
        is_early = len(self._tokens) < self._constraints.min_new_tokens
        token = forced = self._find_forced()
        if token is None:
            token = self._sampler.next(
                logits, allowed=self._compute_allowed(), forbidden=self._find_forbidden()
            )
        self.last_tokens = [token]
        self._tokens.append(token)
        if len(self._tokens) == 1:
            self.times.first_token_s = time.perf_counter()
        is_end = token in self._model.eos_token_ids
        was_thinking = self._is_thinking
        scored = None if self._options.logprobs is None or was_thinking else logits
        built = self._build_token(token, "" if is_end else self._decode(token), scored)
        tokens = self._split(built)
        # Forced tokens, end tokens and the reasoning are not part of the text that the grammar
        # describes.
        is_reasoning = was_thinking or any(each.reasoning for each in tokens)
        if self._constraint is not None and forced is None and not is_end and not is_reasoning:
            self._constraint.accept(token)
        stop = "" if is_early else self._stop_tokens.get(token, "")
        reason = self._find_finish_reason(is_end=is_end, is_stopped=bool(stop))
        if reason is not None and self._reasoning is not None:
            tokens += self._reasoning.flush()
        text = "".join(each.text for each in tokens if not each.reasoning)
        if not is_early:
            text, is_stopped = self._stops.push_tokens(tokens)
            if is_stopped:
                reason, stop = FinishReason.STOP, self._stops.found
        if reason is not None:
            text += self._stops.flush()  # the text held back; "" after a stop string
        return Chunk(text, tuple(tokens), self._build_finished(reason, stop)) if tokens else None

    def _find_forced(self) -> int | None:
        """Return the next token if the model may not choose it, else None."""
        forced = self._constraints.find_forced(self._tokens)
        return self._reasoning.forced_token if forced is None and self._reasoning else forced

    @property
    def _is_thinking(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_inside

    def _decode(self, token: int) -> str:
        """Return the text that a token adds to the whole answer."""
        if (mark := self._model.call_marks.get(token)) is not None:
            return self._detokenizer.flush() + ("" if token in self._stop_tokens else mark)
        added = self._detokenizer.push(token)
        # No character begins in the reasoning and ends in the text, not even over a special token.
        if self._reasoning is not None and self._reasoning.is_closed_by(token):
            added += self._detokenizer.flush()
        return added

    def _split(self, token: Token) -> list[Token]:
        """Return the tokens that are now known to belong to the reasoning or to the text."""
        if self._reasoning is None:
            return [token]
        if token.id in self._model.eos_token_ids:
            return self._reasoning.finish(token)
        is_blank = not token.text.strip() and not self._detokenizer.is_within_character
        return self._reasoning.push(token, is_blank=is_blank)

    def _compute_allowed(self) -> NDArray[np.bool_] | None:
        """Return a mask [V] of the tokens that may follow by the grammar; None for all."""
        reasoning = self._reasoning
        if self._constraint is None or self._is_thinking:
            return None
        allowed = self._constraint.compute_allowed()
        if reasoning is not None:
            allowed[list(reasoning.openers)] = True
        return allowed

    def _find_forbidden(self) -> list[int]:
        forbidden = self._constraints.find_forbidden(self._tokens)
        # An answer that ended inside the reasoning would not match its grammar.
        if self._constraint is not None and self._is_thinking:
            forbidden += self._model.eos_token_ids
        return forbidden

    def _find_finish_reason(self, *, is_end: bool, is_stopped: bool) -> FinishReason | None:
        if is_stopped:
            return FinishReason.STOP
        if is_end or (self._constraint is not None and self._constraint.is_complete):
            return FinishReason.END
        is_full = len(self._tokens) >= self._constraints.max_new_tokens
        return FinishReason.LENGTH if is_full else None

    def _build_finished(self, reason: FinishReason | None, stop: str) -> Finished | None:
        if reason is None:
            return None
        reasoning_tokens = 0 if self._reasoning is None else self._reasoning.token_count
        return Finished(reason, len(self._tokens), self.times.timings(), reasoning_tokens, stop)

    def _build_token(self, token: int, added: str, logits: Logits | None) -> Token:
        """Build a token. With logits [V], add log-probabilities and the requested alternatives."""
        special = self._model.is_special(token)
        if logits is None:
            return Token(token, added, special=special)
        logprob, top = log_probabilities(logits, token, self._options.logprobs or 0)
        alternatives = tuple(self._build_alternative(*each, token, added) for each in top)
        raw_bytes = self._find_raw_bytes(token, added)
        return Token(token, added, logprob, special, alternatives, raw_bytes)

    def _build_alternative(self, id_: int, logprob: float, token: int, added: str) -> TopLogprob:
        special = self._model.is_special(id_)
        # `added` of a special token may be empty, which would not name the token.
        is_named = id_ == token and not special
        text = added if is_named else token_text(self._model.tokenizer, id_)
        return TopLogprob(id_, text, logprob, special, self._find_raw_bytes(id_, text))

    def _find_raw_bytes(self, token: int, text: str) -> bytes | None:
        """Return the bytes of a token if they differ from the UTF-8 of `text`, else None.

        Also return None for a special token, and for a token that does not spell bytes.
        """
        spelled = None if self._model.is_special(token) else self._detokenizer.spell(token)
        return None if spelled == text.encode() else spelled
