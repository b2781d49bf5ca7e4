"""The request router of Ray Serve handles, which also tells where the replicas listen.

serve_config.yaml names it in `request_router_config`. The CLI and the controller import this
module, so it imports little.
"""

from __future__ import annotations

import random

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)


class AnnouncingRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Chooses the less loaded of two random replicas, and publishes the list of replicas."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        # Ray Serve pickles this class by value: imports at the top would be copies.
        from deployments.transports.channel.directory import DIRECTORY
        from deployments.transports.channel.endpoint import Endpoint

        endpoints = {
            replica.replica_id.unique_id: endpoint
            for replica in replicas
            if (endpoint := Endpoint.from_metadata(replica.replica_metadata)) is not None
        }
        DIRECTORY.publish(self._deployment_id.name, endpoints)
