"""Queue that is fair to clients: by priority, then each client in turn, in proportion to cost.

Self-clocked fair queuing (Golestani 1994, https://doi.org/10.1109/INFCOM.1994.337677). Every client
with queued items gets the same share of the served cost, as with deficit round-robin. Unlike there,
the position of an item is known when it is queued, which the prediction of its end requires.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

# Clients without queued items that are kept before the next search for those to forget.
MAX_IDLE_CLIENTS = 64


class _Entry(NamedTuple, Generic[T]):
    priority: int
    finish: float  # cost that every client has been served when this item has been
    number: int  # order of arrival, for equal values of `finish`
    cost: float
    client: str
    item: T

    @property
    def position(self) -> tuple[int, float, int]:
        return self.priority, self.finish, self.number


@dataclass(slots=True)
class _PriorityClass:
    now: float = 0.0  # `finish` of the last item that was taken
    # By client: `finish` of its last item. Values up to `now` have no effect.
    last_finish: dict[str, float] = field(default_factory=dict)


class FairQueue(Generic[T]):
    """Items by priority (lowest first) and client. Iterate it for the order. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: list[_Entry[T]] = []  # by position
        self._classes: dict[int, _PriorityClass] = {}
        self._queued: Counter[str] = Counter()  # items by client
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in self._entries)

    @property
    def first(self) -> T | None:
        return self._entries[0].item if self._entries else None

    def push(self, item: T, *, cost: float, client: str = "", priority: int = 0) -> None:
        """Queue an item. Costs are above 0, in any unit that all items share."""
        group = self._classes.setdefault(priority, _PriorityClass())
        finish = max(group.now, group.last_finish.get(client, 0.0)) + cost
        group.last_finish[client] = finish
        self._queued[client] += 1
        self._pushed += 1
        entry = _Entry(priority, finish, self._pushed, cost, client, item)
        insort(self._entries, entry, key=lambda each: each.position)

    def take_first(self) -> T:
        entry = self._entries.pop(0)
        self._classes[entry.priority].now = entry.finish
        self._forget([entry])
        return entry.item

    def take_last(self) -> T:
        """Take the item whose turn is last; its client is not charged for it."""
        entry = self._entries.pop()
        self._refund([entry])
        return entry.item

    def discard(self, is_unwanted: Callable[[T], bool]) -> list[T]:
        """Remove items and return them in order; their clients are not charged for them."""
        removed = [entry for entry in self._entries if is_unwanted(entry.item)]
        if removed:
            numbers = {entry.number for entry in removed}
            self._entries = [entry for entry in self._entries if entry.number not in numbers]
            self._refund(removed)
        return [entry.item for entry in removed]

    def _refund(self, entries: Sequence[_Entry[T]]) -> None:
        for entry in entries:
            self._classes[entry.priority].last_finish[entry.client] -= entry.cost
        self._forget(entries)

    def _forget(self, entries: Sequence[_Entry[T]]) -> None:
        """Drop what is known of clients without queued items, once it no longer matters."""
        for entry in entries:
            self._queued[entry.client] -= 1
            if not self._queued[entry.client]:
                del self._queued[entry.client]
        if not self._entries:
            self._classes.clear()
        for group in self._classes.values():
            if len(group.last_finish) > len(self._queued) + MAX_IDLE_CLIENTS:
                group.last_finish = {
                    client: finish
                    for client, finish in group.last_finish.items()
                    if finish > group.now or client in self._queued
                }
