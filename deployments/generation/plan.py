"""How much of the waiting prompts is computed before the next token of those that answer: pure.

Streams that run wait while a prompt is read, so a long one is read in parts, with a token for
everybody in between. Prompts are read one after the other, first come, first served: two that share
the time would both be late.
"""

from __future__ import annotations

from deployments.config import SchedulingSettings

# A single token is computed by other kernels, whose rounding is another: no part of a prompt may be
# that short, or the answer would depend on how the prompt was cut, or on what was read before.
FEWEST_TOGETHER = 2


def reading_budget(tokens_per_s: float, rules: SchedulingSettings, *, nobody_waits: bool) -> int:
    """Tokens of prompts to read now: what the time allows, and a part at least."""
    if nobody_waits:
        return rules.part_tokens
    return max(rules.fewest_part_tokens, int(tokens_per_s * rules.stall_ms / 1e3))


def is_worth_a_part(unread: int, budget: int, rules: SchedulingSettings) -> bool:
    """Whether what others left of the budget finishes a prompt, or is enough for a part of it."""
    return budget >= min(unread, rules.fewest_part_tokens)


def part_of(unread: int, most: int) -> int:
    """About `most` of the tokens, so that neither the part nor the rest is a single one."""
    most = max(most, FEWEST_TOGETHER)
    if unread - most == 1:
        return most - 1 if most > FEWEST_TOGETHER else unread
    return min(unread, most)


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
