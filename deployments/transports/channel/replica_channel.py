"""Both ends of channels inside Ray Serve: a replica's server, and the ingress's connections."""

from __future__ import annotations

import logging
from typing import Any, Literal

import ray
from ray import serve

from deployments.config import ray_tls_files
from deployments.transports.channel.directory import DIRECTORY
from deployments.transports.channel.replica_connections import ReplicaConnections
from deployments.transports.channel.server import ChannelServer, Service
from deployments.transports.channel.tls import TlsContexts

log = logging.getLogger("ray.serve.hundredfold")

# Seconds of Serve's shutdown timeout that remain after the wait for accepted calls. Serve needs 2 s
# of these (`graceful_shutdown_wait_loop_s`) before it deletes the replica's object.
SHUTDOWN_RESERVE_S = 5.0
MIN_DRAIN_S = 1.0


class ReplicaChannel:
    """The channel server of a replica. With `transport: handle` there is no server."""

    def __init__(self, service: Service, transport: Literal["channel", "handle"]) -> None:
        self._server: ChannelServer | None = None
        if transport == "channel":
            self._server = ChannelServer(service, TlsContexts.load(ray_tls_files()).server)

    async def start(self) -> dict[str, Any]:
        """Start to listen; return the replica's metadata, empty if no server listens."""
        if self._server is None:
            return {}
        node, host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        try:
            return (await self._server.start(node, host)).to_metadata()
        except OSError as error:
            log.warning("no channel, calls use Ray Serve handles: %s", error)
            await self._server.close(0)
            self._server = None
            return {}

    @property
    def backlog(self) -> int:
        """The cost of the calls that wait for this replica in client processes."""
        return 0 if self._server is None else self._server.backlog

    def check_health(self) -> None:
        """Raise EngineFailed if the server stopped listening."""
        if self._server is not None:
            self._server.check_health()

    async def close(self) -> None:
        """Answer the accepted calls as far as Serve's shutdown timeout allows, then close."""
        if self._server is None:
            return
        config = serve.get_replica_context()._deployment_config
        timeout_s = float(config.graceful_shutdown_timeout_s) - SHUTDOWN_RESERVE_S
        await self._server.close(max(timeout_s, MIN_DRAIN_S))


def connect_to_replicas(deployment: str, spread: int) -> ReplicaConnections:
    """Connect to the replicas of `deployment`, also to those that start later."""
    node, tls = ray.get_runtime_context().get_node_id(), TlsContexts.load(ray_tls_files()).client
    connections = ReplicaConnections(deployment, node, tls, spread)
    DIRECTORY.subscribe(deployment, connections.update)
    return connections
