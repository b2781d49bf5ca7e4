"""Expected lengths of answers, learned from the finished answers of a model."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from operator import neg
from typing import NamedTuple, Self

# The estimate uses at most this many answers, the last ones that finished.
MAX_ANSWERS = 256
# Tokens of an assumed first answer, which counts until MAX_ANSWERS real answers have finished.
# `_Survival.estimate` also assumes at least this length for the longest answers, if a token limit
# cut them.
INITIAL_TOKENS = 256
# Share of the answers that are at most as long as the answer assumed for a new job.
ANSWER_QUANTILE = 0.8


class _Answer(NamedTuple):
    tokens: int
    is_cut: bool  # ended by its token limit; without that limit it would be longer


class _Survival(NamedTuple):
    """Share of answers with more than t tokens, as a step function of t, and its integral."""

    tokens: tuple[int, ...]  # 0, then lengths of answers, ascending, without duplicates
    shares: tuple[float, ...]  # shares[i] applies from tokens[i] up to tokens[i + 1]
    areas: tuple[float, ...]  # areas[i] is the integral from 0 to tokens[i]

    @classmethod
    def estimate(cls, answers: Iterable[_Answer]) -> Self:
        """Estimate the shares as Kaplan and Meier (1958) do: https://doi.org/10.2307/2281868.

        If a token limit cut some of the longest answers, no other answer shows how long the cut
        answers would be. Assume twice their length, and at least INITIAL_TOKENS.
        """
        answers = list(answers)
        remaining, share = len(answers), 1.0
        counts = Counter(answer.tokens for answer in answers)
        ended = Counter(answer.tokens for answer in answers if not answer.is_cut)
        longest = max(counts)
        if cut := counts[longest] - ended[longest]:
            counts[longest] -= cut
            assumed = max(2 * longest, INITIAL_TOKENS)
            ended[assumed] = counts[assumed] = cut
        tokens, shares, areas = [0], [1.0], [0.0]
        for count in sorted(counts):
            if ended[count]:
                share *= 1 - ended[count] / remaining
                areas.append(areas[-1] + shares[-1] * (count - tokens[-1]))
                tokens.append(count)
                shares.append(share)
            remaining -= counts[count]
        return cls(tuple(tokens), tuple(shares), tuple(areas))

    def share_above(self, tokens: float) -> float:
        return self.shares[bisect_right(self.tokens, tokens) - 1]

    def integrate(self, tokens: float) -> float:
        index = bisect_right(self.tokens, tokens) - 1
        return self.areas[index] + self.shares[index] * (tokens - self.tokens[index])


class AnswerLengths:
    """Distribution of the tokens per answer. One thread records; any thread may read."""

    def __init__(self) -> None:
        self._answers = deque([_Answer(INITIAL_TOKENS, is_cut=False)], MAX_ANSWERS)
        self._survival = _Survival.estimate(self._answers)

    def record(self, tokens: int, *, is_cut: bool) -> None:
        """Add a finished answer. `is_cut` states whether the token limit ended the answer."""
        self._answers.append(_Answer(tokens, is_cut))
        self._survival = _Survival.estimate(self._answers)

    def expect_remaining(self, generated: int, minimum: int, limit: int) -> float:
        """Return the expected number of further tokens of an answer with `generated` tokens.

        `minimum` and `limit` are the minimum and maximum tokens of the answer.
        """
        survival = self._survival
        start = min(max(generated, minimum), limit)
        share = survival.share_above(start)
        if share <= 0:  # longer than all earlier answers: assume as many tokens again
            further = float(min(limit - start, max(start, 1)))
        else:
            further = (survival.integrate(limit) - survival.integrate(start)) / share
        return start - generated + further

    def find_quantile(self, minimum: int, limit: int) -> float:
        """Return the fewest tokens that at most `1 - ANSWER_QUANTILE` of the answers exceed.

        The result is at least `minimum` and at most `limit`.
        """
        survival = self._survival
        # The shares descend, but bisection requires ascending values, so negate them.
        index = bisect_left(survival.shares, ANSWER_QUANTILE - 1, key=neg)
        return float(min(max(survival.tokens[index], minimum), limit))
