"""Selection of the calls that leave a full queue for a new call whose turn comes earlier."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from deployments.batching.calls import QueuedCall, QueuedItem
from deployments.fair_queue import FairQueue


def choose_displaced(queue: FairQueue[QueuedItem], ahead: int, excess: int) -> list[QueuedCall]:
    """Return the last calls of a queue that free `excess` places; none if they free too few.

    A call may leave if one of its items is behind the first `ahead` items. If all items leave, that
    is enough even for a larger `excess`, because an empty queue accepts every call.
    """
    if ahead == len(queue):  # the new call would be last, as most are in an overload
        return []
    counts = Counter(id(item.call) for item in queue)
    chosen: dict[int, QueuedCall] = {}
    freed = 0
    for item in reversed(list(islice(queue, ahead, None))):
        if freed >= excess:
            break
        if (key := id(item.call)) not in chosen:
            chosen[key] = item.call
            freed += counts[key]
    return list(chosen.values()) if freed >= min(excess, len(queue)) else []
