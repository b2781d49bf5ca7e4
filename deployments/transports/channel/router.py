"""Request router of Ray Serve handles, which also publishes where the replicas listen.

serve_config.yaml names the router in `request_router_config`. The CLI and the controller import
this module, so the module itself imports little.
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
    """Router that offers two random replicas, and publishes the list of all replicas.

    Ray Serve chooses the less loaded one of the two.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        # Import here, because Ray Serve pickles this class by value. With an import at the top of
        # the module, the pickle would contain a copy of DIRECTORY.
        from deployments.transports.channel.directory import DIRECTORY
        from deployments.transports.channel.endpoint import Endpoint

        endpoints = {
            replica.replica_id.unique_id: endpoint
            for replica in replicas
            if (endpoint := Endpoint.from_metadata(replica.replica_metadata)) is not None
        }
        DIRECTORY.publish(self._deployment_id.name, endpoints)
