"""Speculative decoding by prompt lookup: draft tokens from repeated n-grams.

Outputs often repeat n-grams of the prompt or of themselves. The tokens after an earlier occurrence
of the current n-gram become the draft (prompt lookup decoding, Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding). One call verifies several tokens in little
more time than a decode step takes. Each token is still chosen from its own logits, so drafts never
change an answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

# Sizes of the n-grams to look up, longest first. A single token has too many continuations.
_NGRAM_LENGTHS = (3, 2)
# Tokens whose n-grams one step may index: about 4 ms. A step over so long a slot takes longer.
MAX_INDEXED_TOKENS = 2048
_INITIAL_ACCEPTANCE_RATE = 0.6  # estimate before the first observation
_WEIGHT = 0.12  # weight of a new observation in an estimate
# Share of the distance to its initial value by which an estimate moves per step, so that drafting
# resumes after a bad phase. The acceptance rate moves at each step whose expected gain is too small
# for a draft. The token cost moves at each decode step of a single slot.
_RECOVERY = 0.02
# Assumed cost of an additional token, as a share of a decode step, before the first measurement.
_INITIAL_TOKEN_SHARE = 0.1


class PromptLookupDrafter:
    """Source of draft tokens for one answer."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], max_new_tokens: int) -> None:
        """Keep references: the caller extends `answer` later, up to `max_new_tokens` tokens."""
        # Probability that a draft token is right if all draft tokens before it are right.
        self.acceptance_rate = _INITIAL_ACCEPTANCE_RATE
        self._prompt, self._answer, self._max_new_tokens = prompt, answer, max_new_tokens
        self._tokens: list[int] = []  # of prompt and answer
        self._indexed = 0  # n-grams that end before this index are in `_positions`
        self._positions: dict[tuple[int, ...], int] = {}  # n-gram -> index after its last match

    def draft(self, max_tokens: int, token_share: float) -> list[int]:
        """Return up to `max_tokens` draft tokens.

        Return an empty list if no n-gram repeats or the expected gain is too small. The n-th draft
        token saves a step only if the first n draft tokens are right. Draft it if the probability
        that they are right is at least `token_share`. This is the cost of one more token, divided
        by the cost of a decode step.
        """
        # Verification yields one token more than the draft.
        max_tokens = min(max_tokens, self._max_new_tokens - len(self._answer) - 1)
        if max_tokens < 1:
            return []
        count = 0
        while count < max_tokens and self.acceptance_rate ** (count + 1) >= token_share:
            count += 1
        if not count:
            self.acceptance_rate += _RECOVERY * (_INITIAL_ACCEPTANCE_RATE - self.acceptance_rate)
            return []
        self._index_ngrams()
        for length in _NGRAM_LENGTHS:
            position = self._positions.get(tuple(self._tokens[-length:]))
            if position is not None:
                return self._tokens[position : position + count]
        return []

    def update(self, drafted: int, accepted: int) -> None:
        """Update the acceptance rate. Draft tokens after the first rejected one do not count."""
        outcomes = [1.0] * accepted
        if accepted < drafted:
            outcomes.append(0.0)
        for outcome in outcomes:
            self.acceptance_rate += _WEIGHT * (outcome - self.acceptance_rate)

    def _index_ngrams(self) -> None:
        """Index n-grams of new tokens. Omit the last n-gram, which the drafter looks up.

        Every step that drafts indexes the next part of a long prompt, so that no step waits for the
        whole of it. Until then the drafter finds fewer or earlier matches, which is no error.
        """
        tokens = self._tokens
        tokens += self._prompt[len(tokens) :]
        tokens += self._answer[len(tokens) - len(self._prompt) :]
        start, self._indexed = self._indexed, min(self._indexed + MAX_INDEXED_TOKENS, len(tokens))
        for position in range(start, self._indexed):
            for length in _NGRAM_LENGTHS:
                if position >= length:
                    self._positions[tuple(tokens[position - length : position])] = position


class VerifyCost:
    """Cost of an additional token in a verification, estimated from recent steps.

    There are separate estimates for slots with 2 to 3, 4 to 7, 8 to 15 ... tokens, because the
    share of attention in the cost grows with the used tokens.
    """

    def __init__(self) -> None:
        self._by_size: defaultdict[int, _SizeCost] = defaultdict(_SizeCost)

    def token_share(self, used_tokens: int) -> float:
        """Return the cost per additional token, as a share of a decode step."""
        return self._by_size[used_tokens.bit_length()].token_share

    def update(self, used_tokens: int, tokens: int, elapsed_s: float) -> None:
        """Record the duration of a step that computed `tokens` tokens of a slot."""
        self._by_size[used_tokens.bit_length()].update(tokens, elapsed_s)


@dataclass(slots=True)
class _SizeCost:
    """Estimate for slots with about the same number of tokens."""

    token_share: float = _INITIAL_TOKEN_SHARE
    single_s: float = 0.0  # duration of a step with one token; 0 before the first measurement

    def update(self, tokens: int, elapsed_s: float) -> None:
        if tokens == 1:
            self.single_s += (_WEIGHT if self.single_s else 1.0) * (elapsed_s - self.single_s)
            # Approach the initial estimate too. Otherwise one slow verification could disable
            # drafting for good.
            self.token_share += _RECOVERY * (_INITIAL_TOKEN_SHARE - self.token_share)
        elif self.single_s:
            share = (elapsed_s / self.single_s - 1) / (tokens - 1)
            self.token_share += _WEIGHT * (min(max(share, 0.0), 1.0) - self.token_share)
