"""What a request does to the logits of single tokens before any is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deployments.errors import UnknownToken
from deployments.generation.messages import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenConstraints:
    """What one answer keeps to."""

    most: int  # tokens
    fewest: int  # before these it does not end
    eos_token_ids: tuple[int, ...]
    never: tuple[int, ...] = ()
    no_repeat_ngram_size: int = 0  # no run of so many tokens stands in the answer twice
    before: tuple[int, ...] = ()  # what such a run may begin with: the token that answers follow
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None  # of an answer that reaches `most`

    def forced(self, answer: Sequence[int]) -> int | None:
        """The token that must follow `answer`; None where there is a choice."""
        if not answer:
            return self.forced_bos_token_id
        return self.forced_eos_token_id if len(answer) == self.most - 1 else None

    def forbidden(self, answer: Sequence[int]) -> list[int]:
        """The tokens that may not follow `answer`."""
        early = self.eos_token_ids if len(answer) < self.fewest else ()
        return [*self.never, *early, *self._repeating([*self.before, *answer])]

    def _repeating(self, said: Sequence[int]) -> list[int]:
        size = self.no_repeat_ngram_size
        if not 0 < size <= len(said):
            return []
        begun = said[len(said) - size + 1 :]
        starts = range(len(said) - size + 1)
        return [said[i + size - 1] for i in starts if said[i : i + size - 1] == begun]


# Logits end here, either way: far from what models give, and far enough from the end of single
# precision that differences of two can still be scaled.
MAX_ABS_LOGIT = 1e30
FIRST_ROOM = 256  # tokens an answer may add before its table grows


class Penalties:
    """The penalties and biases of one answer, and the count of its tokens."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int], vocabulary: int) -> None:
        self._repetition = sampling.repetition_penalty
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        self._counts = np.zeros(vocabulary, np.int32)  # of the answer's tokens
        self._listed = np.zeros(vocabulary, np.bool_)
        seen = _known(prompt_ids, vocabulary) if self._repetition != 1 else np.zeros(0, np.int64)
        self._listed[seen] = True
        # Tokens of the prompt and the answer, each once, with room for more behind them.
        self._ids = np.concatenate([seen, np.zeros(FIRST_ROOM, np.int64)])
        self._length = len(seen)
        self._bias_ids, self._bias = _biases(sampling.logit_bias, vocabulary)

    @classmethod
    def of(cls, sampling: Sampling, prompt_ids: Sequence[int], vocabulary: int) -> Penalties | None:
        """What `sampling` asks for, None where that is nothing. Raises UnknownToken."""
        plain = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        if plain == (1, 0, 0) and not sampling.logit_bias:
            return None
        return cls(sampling, prompt_ids, vocabulary)

    def applied(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of logits [V] with all penalties and biases."""
        changed = logits.copy()
        ids = self._ids[: self._length]
        if len(ids):
            values = changed[ids].astype(np.float64)
            if self._repetition != 1:
                with np.errstate(over="ignore"):  # bounded below
                    values = np.where(
                        values > 0, values / self._repetition, values * self._repetition
                    )
            counts = self._counts[ids]
            values -= self._frequency * counts + self._presence * (counts > 0)
            changed[ids] = _bounded(values, changed[ids])
        if len(self._bias_ids):
            values = changed[self._bias_ids].astype(np.float64) + self._bias
            changed[self._bias_ids] = _bounded(values, changed[self._bias_ids])
        return changed

    def count(self, token: int) -> None:
        """Take note that `token` is part of the answer."""
        self._counts[token] += 1
        if self._listed[token]:
            return
        self._listed[token] = True
        if self._length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self._ids[self._length] = token
        self._length += 1


def _known(ids: Sequence[int], vocabulary: int) -> NDArray[np.int64]:
    unique = np.unique(np.asarray(ids, dtype=np.int64))
    return unique[(unique >= 0) & (unique < vocabulary)]


def _biases(
    given: tuple[tuple[int, float], ...], vocabulary: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    for token, _ in given:
        if not 0 <= token < vocabulary:
            raise UnknownToken(
                f"`logit_bias` names token {token}, the vocabulary ends at {vocabulary - 1}",
                field="logit_bias",
            )
    biases = dict(given)  # the last one counts, as in a JSON object
    return np.array([*biases], np.int64), np.array([*biases.values()], np.float64)


def _bounded(values: NDArray[np.float64], before: NDArray[np.float32]) -> NDArray[np.float64]:
    """Changed logits within bounds; what the model ruled out stays so."""
    return np.where(before == -np.inf, -np.inf, np.clip(values, -MAX_ABS_LOGIT, MAX_ABS_LOGIT))
