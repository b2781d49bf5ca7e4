"""The replicas of each deployment that this process knows, by deployment name.

Ray Serve pickles the request router class by value, so that its module's globals are copies. It
therefore imports this module when it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from deployments.transports.channel.endpoint import Endpoint

Endpoints = Mapping[str, Endpoint]  # by replica id
Listener = Callable[[Endpoints], None]


class Directory:
    """Passes changes to listeners on their own event loops."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Endpoints] = {}
        self._listeners: dict[str, list[tuple[asyncio.AbstractEventLoop, Listener]]] = {}

    def publish(self, deployment: str, endpoints: Endpoints) -> None:
        """Replace the replicas of a deployment; call it from any thread."""
        self._endpoints[deployment] = endpoints
        for loop, listener in self._listeners.get(deployment, ()):
            loop.call_soon_threadsafe(listener, endpoints)

    def subscribe(self, deployment: str, listener: Listener) -> None:
        """Call `listener` in the running event loop, now and after every change."""
        loop = asyncio.get_running_loop()
        self._listeners.setdefault(deployment, []).append((loop, listener))
        loop.call_soon(listener, self._endpoints.get(deployment, {}))


DIRECTORY = Directory()
