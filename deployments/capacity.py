"""Limits on what all requests in flight in one ingress replica use together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deployments.errors import Overloaded


class Capacity:
    """Counter of the units in use, such as items or bytes. Use from one event loop.

    The concurrent requests of one client may together use half of the limit. A single request may
    use the whole limit. Requests without a client name have no limit per client.
    """

    def __init__(self, limit: Callable[[], int], unit: str, setting: str | None = None) -> None:
        """Store `limit`. Each reservation calls it, because settings change without a restart.

        `setting` is the limit's name in `serve_config.yaml`, for errors; None: the limit is fixed.
        """
        self.used = 0
        self._limit = limit
        self._unit = unit
        self._reached = f"`{setting}` is reached: " if setting else ""
        self._used_by: Counter[str] = Counter()  # units by client, only for clients with a name

    @property
    def limit(self) -> int:
        return self._limit()

    def reserve(self, units: int, client: str = "", *, held: int = 0) -> None:
        """Reserve `units` for a request of `client` that has reserved `held` units already.

        Raises Overloaded (429) if too few are free in total or for `client`.
        """
        if not units:
            return
        limit, own = self._limit(), self._used_by[client]
        if own > held and 2 * (own + units) > limit:
            raise Overloaded(
                f"{self._reached}{own} {self._unit} of this client are in flight and the request "
                f"needs {units}; one client may have {limit // 2}. Retry later."
            )
        if self.used + units > limit:
            raise Overloaded(
                f"{self._reached}{self.used} of {limit} {self._unit} are in use, the request "
                f"needs {units}. Retry later."
            )
        self.used += units
        if client:
            self._used_by[client] += units

    def release(self, units: int, client: str = "") -> None:
        self.used -= units
        if client:
            self._used_by[client] -= units
            if not self._used_by[client]:
                del self._used_by[client]

    @contextmanager
    def hold(self, units: int, client: str = "") -> Iterator[None]:
        """Reserve `units` for the block. Raises as `reserve` does."""
        self.reserve(units, client)
        try:
            yield
        finally:
            self.release(units, client)
