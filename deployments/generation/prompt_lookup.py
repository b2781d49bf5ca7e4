"""Drafts: the next tokens of an answer, guessed from what stands before, to be verified at once.

Texts repeat themselves and what they were asked: after words that came before, often the same
follow (prompt lookup decoding, Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
Several tokens are verified in little more time than one takes, so a guess that is right is a step
saved. What is guessed never changes an answer: every token is chosen by its own logits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

# Endings that are looked up, in tokens, the longer first. A single one is followed by too much.
_LENGTHS = (3, 2)
# Of a guess being right, until there were some; how much the latest one counts; and how fast those
# are forgotten that made an end to guessing.
_FIRST_CHANCE, _WEIGHT, _RECOVERY = 0.6, 0.12, 0.02
# What a token more adds to a step for one row, as a share of it, until that was measured.
_FIRST_SHARE = 0.1


class PromptLookupDrafter:
    """Guesses what comes next in one answer."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], longest: int) -> None:
        """For an `answer` that grows, to `longest` tokens at most."""
        self.chance = _FIRST_CHANCE  # that a token is right, if those before it were
        self._prompt, self._answer, self._longest = prompt, answer, longest
        self._tokens: list[int] = []  # of both, as far as they were looked at
        self._places: dict[tuple[int, ...], int] = {}  # behind the latest of each ending

    def draft(self, most: int, cost: float) -> list[int]:
        """What may come next, at most `most` tokens; none where guessing is not worth it.

        The n-th token counts if all n are right, so that must be at least as likely as its `cost`,
        which is a share of the step that it may save.
        """
        most = min(most, self._longest - len(self._answer) - 1)  # one comes in any case
        if most < 1:
            return []
        wanted = 0
        while wanted < most and self.chance ** (wanted + 1) >= cost:
            wanted += 1
        if not wanted:
            self.chance += _RECOVERY * (_FIRST_CHANCE - self.chance)
            return []
        self._look_up()
        for length in _LENGTHS:
            place = self._places.get(tuple(self._tokens[-length:]))
            if place is not None:
                return self._tokens[place : place + wanted]
        return []

    def learn(self, drafted: int, accepted: int) -> None:
        """Note how many tokens of a draft were right; the one behind them was wrong, if any."""
        outcomes = [1.0] * accepted
        if accepted < drafted:
            outcomes.append(0.0)
        for right in outcomes:
            self.chance += _WEIGHT * (right - self.chance)

    def _look_up(self) -> None:
        """Note all endings but that of the whole, which is the one that is looked for."""
        tokens = self._tokens
        known = len(tokens)
        tokens += self._prompt[known:]
        tokens += self._answer[len(tokens) - len(self._prompt) :]
        for place in range(known, len(tokens)):
            for length in _LENGTHS:
                if place >= length:
                    self._places[tuple(tokens[place - length : place])] = place


class VerifyCost:
    """What a token more adds to a step for one row, learnt from the latest steps.

    Apart for rows of up to 2, 4, 8 ... tokens: attention's share grows with what a row holds.
    """

    def __init__(self) -> None:
        self._by_size: defaultdict[int, _Cost] = defaultdict(_Cost)

    def share(self, filled: int) -> float:
        """The cost for a row that holds `filled` tokens, as a share of a step for one token."""
        return self._by_size[filled.bit_length()].share

    def learn(self, filled: int, tokens: int, took_s: float) -> None:
        """Take a step of so many tokens into account."""
        self._by_size[filled.bit_length()].learn(tokens, took_s)


@dataclass(slots=True)
class _Cost:
    """Of rows of about one length."""

    share: float = _FIRST_SHARE
    single_s: float = 0.0  # a step for one token; 0 until there was one

    def learn(self, tokens: int, took_s: float) -> None:
        if tokens == 1:
            self.single_s += (_WEIGHT if self.single_s else 1.0) * (took_s - self.single_s)
            # Towards the first guess too, or one slow step could make an end to verifying.
            self.share += _RECOVERY * (_FIRST_SHARE - self.share)
        elif self.single_s:
            share = (took_s / self.single_s - 1) / (tokens - 1)
            self.share += _WEIGHT * (min(max(share, 0.0), 1.0) - self.share)
