"""How much of the waiting prompts is computed before the next token of those that answer: pure.

Streams that run wait while a prompt is read, so a long one is read in parts, with a token for
everybody in between. Prompts are read one after the other, first come, first served: two that share
the time would both be late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deployments.config import SchedulingSettings

# A single token is computed by other kernels, whose rounding is another: no part of a prompt may be
# that short, or the answer would depend on how the prompt was cut.
FEWEST = 2


class Unread(NamedTuple):
    """A prompt that is not computed to its end."""

    row: int
    tokens: int  # left to read


class PromptPart(NamedTuple):
    """What is read of a prompt in one go."""

    row: int
    tokens: int


def plan_reading(
    unread: Sequence[Unread], answering: int, tokens_per_s: float, rules: SchedulingSettings
) -> list[PromptPart]:
    """The parts to read now: first come first, as many as the time allows, at least one.

    `answering` streams wait meanwhile; when there are none, parts are as long as the rules allow.
    """
    if not unread:
        return []
    if not answering:
        first = unread[0]
        return [PromptPart(first.row, _part(first.tokens, rules.part_tokens))]
    budget = max(rules.fewest_part_tokens, int(tokens_per_s * rules.stall_ms / 1e3))
    parts: list[PromptPart] = []
    for prompt in unread:
        part = _part(prompt.tokens, min(budget, rules.part_tokens))
        # The next in line gets what is left of the time if that finishes it or is worth a part.
        if parts and part < min(prompt.tokens, rules.fewest_part_tokens):
            break
        if parts and part > budget:
            break
        parts.append(PromptPart(prompt.row, part))
        budget -= part
        if part < prompt.tokens or budget < FEWEST:
            break
    return parts


def _part(tokens: int, most: int) -> int:
    """About `most` of `tokens`, so that neither the part nor the rest is a single token."""
    most = max(most, FEWEST)
    if tokens - most == 1:
        return most - 1 if most > FEWEST else tokens
    return min(tokens, most)


class ReadingSpeed:
    """How fast prompts are read, learnt from the latest parts; tokens per second."""

    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s

    def learn(self, tokens: int, took_s: float, fewest: int) -> None:
        """Take a part into account; a short one says little of speed."""
        if tokens >= fewest and took_s > 0:
            # Slower counts at once, faster by and by: who waits is promised a time.
            measured = tokens / took_s
            weight = 1.0 if measured < self.tokens_per_s else 0.25
            self.tokens_per_s += weight * (measured - self.tokens_per_s)
