"""Constraints, penalties and biases that a request applies to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deployments.errors import UnknownToken
from deployments.messages import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenConstraints:
    """Rules for one answer: its length limits, and suppressed, forced and repeated tokens."""

    max_new_tokens: int
    min_new_tokens: int  # an end token is forbidden before this many tokens
    eos_token_ids: tuple[int, ...]
    suppressed: tuple[int, ...] = ()
    no_repeat_ngram_size: int = 0  # n-grams of this size do not repeat; 0 disables
    prefix: tuple[int, ...] = ()  # tokens before the answer for repetition rules
    forced_bos_token_id: int | None = None  # first token of the answer; None: not forced
    forced_eos_token_id: int | None = None  # last token of an answer with `max_new_tokens` tokens

    def find_forced(self, answer: Sequence[int]) -> int | None:
        """Return the token that must follow `answer`; None if no token is forced."""
        if not answer:
            return self.forced_bos_token_id
        return self.forced_eos_token_id if len(answer) == self.max_new_tokens - 1 else None

    def find_forbidden(self, answer: Sequence[int]) -> list[int]:
        """Return the tokens that must not follow `answer`."""
        early = self.eos_token_ids if len(answer) < self.min_new_tokens else ()
        return [*self.suppressed, *early, *self._find_repeating([*self.prefix, *answer])]

    def _find_repeating(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that would complete an n-gram which is already in `tokens`."""
        size = self.no_repeat_ngram_size
        if not 0 < size <= len(tokens):
            return []
        ending = tokens[len(tokens) - size + 1 :]
        starts = range(len(tokens) - size + 1)
        return [tokens[i + size - 1] for i in starts if tokens[i : i + size - 1] == ending]


# Changed logits are limited to this absolute value. It exceeds the logits of any model, and the
# difference of two such values is still finite in float32.
MAX_ABS_LOGIT = 1e30
_INITIAL_ANSWER_CAPACITY = 256  # answer tokens that fit before `_ids` grows


class Penalties:
    """Penalties and biases of one answer, with the counts of its tokens."""

    def __init__(
        self, sampling: SamplingParams, prompt_ids: Sequence[int], vocabulary: int
    ) -> None:
        self._repetition = sampling.repetition_penalty
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        self._counts = np.zeros(vocabulary, np.int32)  # occurrences of each token in the answer
        self._is_listed = np.zeros(vocabulary, np.bool_)  # whether `_ids` contains each token
        prompt = np.zeros(0, np.int64)
        if self._repetition != 1:
            prompt = _unique_ids(prompt_ids, vocabulary)
        self._is_listed[prompt] = True
        # Distinct tokens of prompt and answer, followed by unused capacity.
        self._ids = np.concatenate([prompt, np.zeros(_INITIAL_ANSWER_CAPACITY, np.int64)])
        self._length = len(prompt)
        self._bias_ids, self._bias = _parse_biases(sampling.logit_bias, vocabulary)

    @classmethod
    def from_params(
        cls, sampling: SamplingParams, prompt_ids: Sequence[int], vocabulary: int
    ) -> Penalties | None:
        """Build the penalties; None if `sampling` requests no penalty and no bias.

        Raises UnknownToken for a bias of an id beyond the vocabulary.
        """
        values = (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        if values == (1, 0, 0) and not sampling.logit_bias:
            return None
        return cls(sampling, prompt_ids, vocabulary)

    def apply(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a copy of logits [V] with all penalties and biases."""
        changed = logits.copy()
        ids = self._ids[: self._length]
        if len(ids):
            values = changed[ids].astype(np.float64)
            if self._repetition != 1:
                with np.errstate(over="ignore"):  # clipped below
                    values = np.where(
                        values > 0, values / self._repetition, values * self._repetition
                    )
            counts = self._counts[ids]
            values -= self._frequency * counts + self._presence * (counts > 0)
            changed[ids] = _clip(values, changed[ids])
        if len(self._bias_ids):
            values = changed[self._bias_ids].astype(np.float64) + self._bias
            changed[self._bias_ids] = _clip(values, changed[self._bias_ids])
        return changed

    def count(self, token: int) -> None:
        """Record `token` as part of the answer."""
        self._counts[token] += 1
        if self._is_listed[token]:
            return
        self._is_listed[token] = True
        if self._length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self._ids[self._length] = token
        self._length += 1


def _unique_ids(ids: Sequence[int], vocabulary: int) -> NDArray[np.int64]:
    unique = np.unique(np.asarray(ids, dtype=np.int64))
    return unique[(unique >= 0) & (unique < vocabulary)]


def _parse_biases(
    pairs: tuple[tuple[int, float], ...], vocabulary: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    for token, _ in pairs:
        if not 0 <= token < vocabulary:
            raise UnknownToken(
                f"`logit_bias` contains token id {token}; the maximum is {vocabulary - 1}",
                field="logit_bias",
            )
    biases = dict(pairs)  # the last value of a repeated id applies, as in a JSON object
    return np.array([*biases], np.int64), np.array([*biases.values()], np.float64)


def _clip(values: NDArray[np.float64], before: NDArray[np.float32]) -> NDArray[np.float64]:
    """Limit changed logits to MAX_ABS_LOGIT; -inf stays -inf."""
    return np.where(before == -np.inf, -np.inf, np.clip(values, -MAX_ABS_LOGIT, MAX_ABS_LOGIT))
