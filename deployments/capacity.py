"""Bounds over all requests in flight of one ingress replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deployments.errors import Overloaded


class Capacity:
    """Units in use, such as items or bytes. Use from one event loop."""

    def __init__(self, limit: Callable[[], int], unit: str) -> None:
        """`limit` is read at each reservation, because settings change without a restart."""
        self.used = 0
        self._limit = limit
        self._unit = unit

    @property
    def limit(self) -> int:
        return self._limit()

    def reserve(self, units: int) -> None:
        """Reserve `units`. Raises Overloaded (429) at once when too few are free."""
        limit = self._limit()
        if self.used + units > limit:
            raise Overloaded(
                f"Model is overloaded: {self.used} of {limit} {self._unit} are in use and the "
                f"request needs {units}. Retry later."
            )
        self.used += units

    def release(self, units: int) -> None:
        self.used -= units

    @contextmanager
    def hold(self, units: int) -> Iterator[None]:
        """Reserve `units` for the block. Raises Overloaded."""
        self.reserve(units)
        try:
            yield
        finally:
            self.release(units)
