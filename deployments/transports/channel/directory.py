"""Directory of the known replicas of each deployment. A process has one directory.

Ray Serve pickles the request router class by value, and with it the globals of its module. The
router therefore imports this module at run time, to get the DIRECTORY of the process, not a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from deployments.transports.channel.endpoint import Endpoint

Endpoints = Mapping[str, Endpoint]  # by replica id
Listener = Callable[[Endpoints], None]


class Directory:
    """Directory that reports changes to listeners on the listeners' event loops."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Endpoints] = {}
        self._listeners: dict[str, list[tuple[asyncio.AbstractEventLoop, Listener]]] = {}

    def publish(self, deployment: str, endpoints: Endpoints) -> None:
        """Replace the replicas of a deployment; call it from any thread."""
        self._endpoints[deployment] = endpoints
        for loop, listener in self._listeners.get(deployment, ()):
            loop.call_soon_threadsafe(self._report, deployment, listener)

    def subscribe(self, deployment: str, listener: Listener) -> None:
        """Call `listener` in the running event loop, now and after every change."""
        loop = asyncio.get_running_loop()
        self._listeners.setdefault(deployment, []).append((loop, listener))
        loop.call_soon(self._report, deployment, listener)

    def _report(self, deployment: str, listener: Listener) -> None:
        """Call `listener` with the present replicas.

        The replicas may be newer than the change that scheduled this call.
        """
        listener(self._endpoints.get(deployment, {}))


DIRECTORY = Directory()
