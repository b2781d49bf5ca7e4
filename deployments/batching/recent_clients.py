"""Clients of the last second, and how many items each usually has in the replica."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.messages import Sender

RECENT_S = 1.0  # a client is recent for this many seconds after its last call
WEIGHT = 0.1  # weight of a new call in the moving average `usual_items` of the client


@dataclass(slots=True)
class _Presence:
    items: int = 0  # items of all calls that have not ended
    usual_items: float = 0.0  # moving average of `items`, updated by each new call
    seen_s: float = 0.0

    def is_recent(self, now_s: float) -> bool:
        return now_s - self.seen_s <= RECENT_S


class RecentClients:
    """Clients with recent or unfinished calls, and their numbers of items.

    A client with calls of two priorities counts as two clients. All times are seconds of one clock.
    """

    def __init__(self) -> None:
        self._clients: dict[Sender, _Presence] = {}

    def start(self, client: Sender, items: int, now_s: float) -> None:
        presence = self._clients.get(client)
        if presence is None:
            presence = self._clients[client] = _Presence(usual_items=items)
        presence.items += items
        presence.usual_items += WEIGHT * (presence.items - presence.usual_items)
        presence.seen_s = now_s

    def end(self, client: Sender, items: int) -> None:
        self._clients[client].items -= items

    def has_several(self, now_s: float) -> bool:
        """Return whether at least two clients are recent. Stops counting at two, to be fast."""
        recent = (True for presence in self._clients.values() if presence.is_recent(now_s))
        return next(recent, False) and next(recent, False)

    def find_fewest_items(self, now_s: float) -> int | None:
        """Return the smallest usual number of items among the recent clients.

        Return None if fewer than two clients are recent. Also remove the clients that are neither
        recent nor have items, so that they use no memory.
        """
        gone, recent = [], []
        for client, presence in self._clients.items():
            if presence.is_recent(now_s):
                recent.append(presence.usual_items)
            elif not presence.items:
                gone.append(client)
        for client in gone:
            del self._clients[client]
        return round(min(recent)) if len(recent) > 1 else None
