"""Which waiting items run next: a pure function of their lengths.

The cost of a forward pass is its padded size, longest x count, so a batch is a window of the
items sorted by length. The window always holds the item that waited longest, so nothing starves.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployments.config import BatchSettings

# Items looked at per decision. Far more than a batch holds, few enough to sort in microseconds.
LOOK_AHEAD = 512


def plan(lengths: Sequence[int], rules: BatchSettings, idle_runs: int = 1) -> list[int]:
    """Indices of the items for the next pass, shortest first; never empty.

    `lengths` are token counts in order of arrival, at least one. With several idle engine
    threads the items are shared out, because two half batches at once beat one after the other.
    The oldest item runs even if it alone exceeds the budget.
    """
    considered = lengths[:LOOK_AHEAD]
    order = sorted(range(len(considered)), key=considered.__getitem__)  # stable: ties by arrival
    share = -(-len(considered) // max(idle_runs, 1))
    count_limit = min(rules.max_items, share)

    low = order.index(0)
    high = low + 1
    while high - low < count_limit:
        longest = considered[order[high - 1]]
        anchor = considered[0]
        shorter = low > 0 and longest * (high - low + 1) <= rules.budget_tokens
        longer = (
            high < len(order) and considered[order[high]] * (high - low + 1) <= rules.budget_tokens
        )
        if not (shorter or longer):
            break
        if shorter and longer:
            # Grow towards the nearer length: that side wastes less padding.
            shorter = anchor - considered[order[low - 1]] <= considered[order[high]] - anchor
        if shorter:
            low -= 1
        else:
            high += 1
    return order[low:high]
