"""Queue ordered by priority; clients with equal priority get equal shares of the served cost.

Self-clocked fair queuing (Golestani 1994, https://doi.org/10.1109/INFCOM.1994.337677). Every client
with queued items gets the same share of the served cost, as with deficit round-robin. Unlike with
deficit round-robin, an item has a position as soon as it is queued. The prediction of its end needs
this position.

A lower priority never starves. While items of a higher priority wait, it gets LOWER_SHARE of the
cost that is served to the higher one.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

# Per priority, the queue keeps the state of this many clients without queued items. With more, it
# drops the state of those clients whose earlier cost no longer changes the order.
MAX_IDLE_CLIENTS = 64
LOWER_SHARE = 1 / 16


class _WaitingItem(NamedTuple, Generic[T]):
    priority: int
    # Virtual finish time: the served cost that each waiting client of the same priority has
    # reached when this item ends.
    finish: float
    number: int  # order of arrival, for equal values of `finish`
    cost: float
    client: str
    item: T

    @property
    def position(self) -> tuple[int, float, int]:
        return self.priority, self.finish, self.number


@dataclass(slots=True)
class _PriorityClass:
    now: float = 0.0  # `finish` of the item whose turn it was when items were last taken
    # By client: `finish` of its last item. Values up to `now` have no effect.
    last_finish: dict[str, float] = field(default_factory=dict)


class FairQueue(Generic[T]):
    """Items by priority, then fair between clients. Not thread-safe.

    The lowest number is the highest priority. Iteration yields the items in this order, and ignores
    the turns that lower priorities get by LOWER_SHARE.
    """

    def __init__(self) -> None:
        self._entries: list[_WaitingItem[T]] = []  # sorted by position
        self._classes: dict[int, _PriorityClass] = {}
        self._queued: Counter[str] = Counter()  # number of queued items by client
        self._pushed = 0
        self._cost = 0.0
        # Cost served to the highest priority, minus the cost served to lower ones / LOWER_SHARE. A
        # lower priority gets a turn when LOWER_SHARE * this value reaches the cost of its next
        # item. The value is negative after a turn of many items.
        self._overtaken = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in self._entries)

    @property
    def first(self) -> T | None:
        """The item to serve next; None if the queue is empty."""
        return self._entries[self._turn()].item if self._entries else None

    @property
    def cost(self) -> float:
        """The cost of all queued items."""
        return max(self._cost, 0.0) if self._entries else 0.0

    def count_ahead(self, *, cost: float, client: str = "", priority: int = 0) -> int:
        """Return how many items would precede an item pushed now, in the order of iteration."""
        position = (priority, self._finish(cost, client, priority), self._pushed + 1)
        return bisect(self._entries, position, key=lambda each: each.position)

    def ahead(self, *, cost: float, client: str = "", priority: int = 0) -> list[T]:
        """Return the items that would be served before an item that is pushed now, in order."""
        return [entry.item for entry in self._entries_ahead(cost, client, priority)]

    def cost_ahead(self, *, cost: float, client: str = "", priority: int = 0) -> float:
        """Return the cost of the items that would be served before an item that is pushed now."""
        return sum(entry.cost for entry in self._entries_ahead(cost, client, priority))

    def peek(self, count: int) -> list[T]:
        """Return up to `count` items, starting with the one to serve next."""
        start, end = self._find_window(count)
        return [entry.item for entry in self._entries[start:end]]

    def push(self, item: T, *, cost: float, client: str = "", priority: int = 0) -> None:
        """Queue an item. Costs are above 0, in any unit that all items share."""
        finish = self._finish(cost, client, priority)
        self._classes[priority].last_finish[client] = finish
        self._cost += cost
        self._queued[client] += 1
        self._pushed += 1
        entry = _WaitingItem(priority, finish, self._pushed, cost, client, item)
        if self._entries and entry.position < self._entries[-1].position:
            insort(self._entries, entry, key=lambda each: each.position)
        else:
            self._entries.append(entry)

    def take_first(self) -> T:
        return self.take(1, lambda _items: [0])[0]

    def take(self, count: int, choose: Callable[[list[T]], Sequence[int]]) -> list[T]:
        """Take the items of `peek(count)` whose indices `choose` returns.

        Index 0 must be one of them. The other chosen items are served before their turn, and their
        clients are charged for them.
        """
        start, end = self._find_window(count)
        window = self._entries[start:end]
        chosen = choose([entry.item for entry in window])
        taken = [window[index] for index in chosen]
        self._charge_priorities(taken)
        numbers = {entry.number for entry in taken}
        self._entries[start:end] = [entry for entry in window if entry.number not in numbers]
        self._classes[window[0].priority].now = window[0].finish
        self._forget(taken)
        return [entry.item for entry in taken]

    def take_last(self) -> T:
        """Take the last item in the order of iteration; its client is not charged for it."""
        entry = self._entries.pop()
        self._classes[entry.priority].last_finish[entry.client] -= entry.cost
        self._forget([entry])
        return entry.item

    def discard(self, is_unwanted: Callable[[T], bool]) -> list[T]:
        """Remove items and return them in order; their clients are not charged for them.

        Later items of these clients move forward, as if the removed items had never been pushed.
        """
        removed = [entry for entry in self._entries if is_unwanted(entry.item)]
        if removed:
            self._close_gaps(removed)
            self._forget(removed)
        return [entry.item for entry in removed]

    def _entries_ahead(self, cost: float, client: str, priority: int) -> Iterable[_WaitingItem[T]]:
        """Return the entries that would be served before an item that is pushed now.

        An item of a lower priority does not wait for all items of the highest one, because the
        lower priorities get LOWER_SHARE. An item of the highest priority waits for their turns too,
        but the result ignores these turns.
        """
        count = self.count_ahead(cost=cost, client=client, priority=priority)
        if not count or self._entries[0].priority == priority:
            return islice(self._entries, count)
        start = self._find_lower()
        lower = self._entries[start:count]
        higher, overtaken = 0, self._overtaken
        for turn in (*(entry.cost for entry in lower), cost):
            while higher < start and overtaken * LOWER_SHARE < turn:
                overtaken += self._entries[higher].cost
                higher += 1
            overtaken -= turn / LOWER_SHARE
        return chain(islice(self._entries, higher), lower)

    def _turn(self) -> int:
        """Return the index of the item to serve next: 0, or the first of a lower priority."""
        entries = self._entries
        if not entries or entries[0].priority == entries[-1].priority:
            return 0
        lower = self._find_lower()
        return lower if self._overtaken * LOWER_SHARE >= entries[lower].cost else 0

    def _find_window(self, count: int) -> tuple[int, int]:
        """Return the start and end of the slice of items from which the next turn takes.

        A turn of the highest priority may also take items of lower ones, but not while `_overtaken`
        is negative. The lower priorities then have had more than LOWER_SHARE.
        """
        start = self._turn()
        end = min(start + count, len(self._entries))
        if start == 0 and end and self._overtaken < 0:
            end = min(end, self._find_lower())
        return start, end

    def _find_lower(self) -> int:
        """Return the index of the first item below the highest queued priority."""
        highest = self._entries[0].priority
        return bisect(self._entries, (highest, inf, 0), key=lambda each: each.position)

    def _charge_priorities(self, taken: Sequence[_WaitingItem[T]]) -> None:
        """Update `_overtaken`. Call this before the items in `taken` leave the queue."""
        highest, last = self._entries[0].priority, self._entries[-1].priority
        for entry in taken:
            is_highest = entry.priority == highest
            self._overtaken += entry.cost if is_highest else -entry.cost / LOWER_SHARE
        if highest == last:  # a lower priority earns no turns while it has no items
            self._overtaken = min(self._overtaken, 0.0)

    def _finish(self, cost: float, client: str, priority: int) -> float:
        group = self._classes.setdefault(priority, _PriorityClass())
        return max(group.now, group.last_finish.get(client, 0.0)) + cost

    def _close_gaps(self, removed: Sequence[_WaitingItem[T]]) -> None:
        """Remove the entries in `removed`, and let later entries of the same clients end earlier.

        No entry gets a lower `finish` than if it were pushed now.
        """
        numbers = {entry.number for entry in removed}
        gaps = {(entry.priority, entry.client): 0.0 for entry in removed}  # removed cost by sender
        ends: dict[tuple[int, str], float] = {}  # `finish` of the client's last kept entry
        kept: list[_WaitingItem[T]] = []
        is_sorted = True
        for entry in self._entries:
            sender = entry.priority, entry.client
            if sender in gaps:
                if entry.number in numbers:
                    gaps[sender] += entry.cost
                    continue
                if gap := gaps[sender]:
                    group = self._classes[entry.priority]
                    earliest = max(group.now, ends.get(sender, 0.0)) + entry.cost
                    finish = max(entry.finish - gap, earliest)
                    entry, is_sorted = entry._replace(finish=finish), False
                ends[sender] = entry.finish
            kept.append(entry)
        self._entries = kept if is_sorted else sorted(kept, key=lambda each: each.position)
        for sender, gap in gaps.items():
            priority, client = sender
            last = self._classes[priority].last_finish
            last[client] = max(last[client] - gap, ends.get(sender, 0.0))

    def _forget(self, entries: Sequence[_WaitingItem[T]]) -> None:
        """Subtract removed entries from the totals.

        If many clients are idle, drop the values of `last_finish` that have no effect.
        """
        for entry in entries:
            self._cost -= entry.cost
            self._queued[entry.client] -= 1
            if not self._queued[entry.client]:
                del self._queued[entry.client]
        if not self._entries:
            self._classes.clear()
            self._cost = 0.0
        for group in self._classes.values():
            if len(group.last_finish) > len(self._queued) + MAX_IDLE_CLIENTS:
                group.last_finish = {
                    client: finish
                    for client, finish in group.last_finish.items()
                    if finish > group.now or client in self._queued
                }
