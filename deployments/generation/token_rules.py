"""Tokens that may not come next, and tokens that must: whatever their logits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What one answer keeps to."""

    most: int  # tokens
    fewest: int  # before these it does not end
    end_tokens: tuple[int, ...]
    never: tuple[int, ...] = ()
    no_repeat_ngram: int = 0  # no run of so many tokens stands in the answer twice
    before: tuple[int, ...] = ()  # what such a run may begin with: the token that answers follow
    first_token: int | None = None
    last_token: int | None = None  # of an answer that reaches `most`

    def forced(self, answer: Sequence[int]) -> int | None:
        """The token that must follow `answer`; None where there is a choice."""
        if not answer:
            return self.first_token
        return self.last_token if len(answer) == self.most - 1 else None

    def forbidden(self, answer: Sequence[int]) -> list[int]:
        """The tokens that may not follow `answer`."""
        early = self.end_tokens if len(answer) < self.fewest else ()
        return [*self.never, *early, *self._repeating([*self.before, *answer])]

    def _repeating(self, said: Sequence[int]) -> list[int]:
        size = self.no_repeat_ngram
        if not 0 < size <= len(said):
            return []
        begun = said[len(said) - size + 1 :]
        starts = range(len(said) - size + 1)
        return [said[i + size - 1] for i in starts if said[i : i + size - 1] == begun]
