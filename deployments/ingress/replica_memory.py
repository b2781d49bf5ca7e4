"""Operations on the models in the memory of the replicas: list, load and unload."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict

from deployments.deadlines import deadline_after, enforce_deadline
from deployments.deployment_names import ENCODER_DEPLOYMENTS, GENERATOR_DEPLOYMENTS
from deployments.errors import HardwareUnavailable, InvalidField, ModelInUse, ServeError
from deployments.ingress.models.permitted_models import PermittedModels
from deployments.keys.caller import current_caller
from deployments.messages import LoadedModel, PoolRequest, PoolState
from deployments.registry import RegisteredModel
from deployments.transports.base import ModelPoolClient

TIMEOUT_S = 60.0  # limit for the answers of all replicas, long enough to load a model


class LoadedEntry(BaseModel):
    """One model in the memory of one replica."""

    model_config = ConfigDict(frozen=True)

    model: str
    version: str
    deployment: str
    replica: str
    bytes: int
    pinned: bool
    in_use: int  # calls that use the model now
    age_s: float  # seconds since the load
    idle_s: float  # seconds since the last use
    requests_per_minute: float  # estimated for the last minute


class ReplicaMemory:
    """Models in the memory of the replicas. `pools` maps deployment names to ModelPoolClients."""

    def __init__(self, pools: Mapping[str, ModelPoolClient], permitted: PermittedModels) -> None:
        self._pools = pools
        self._permitted = permitted

    async def list_loaded(self) -> list[LoadedEntry]:
        """List the loaded models of every replica, restricted to models that the caller may use.

        Replicas that answer with an error are omitted.
        """
        states = await self._manage(self._pools, PoolRequest("list"))
        may_use = current_caller().may_use_model
        entries = (
            _describe(deployment, replica, loaded)
            for (deployment, replica), state in states.items()
            if isinstance(state, PoolState)
            for loaded in state.models
            if may_use(loaded.ref.id)
        )
        return sorted(entries, key=lambda one: (one.model, one.version, one.deployment))

    async def load(self, name: str) -> list[LoadedEntry]:
        """Load a model into every replica that can run it. Return one entry per replica.

        Raises HardwareUnavailable if no such replica is connected. Raises the first error of a
        replica, and the errors of `PermittedModels.find`.
        """
        model = self._permitted.find(name)
        return await self._change(model, PoolRequest("load", model.ref))

    async def unload(self, name: str) -> list[LoadedEntry]:
        """Remove a model from the memory of all replicas; the next request loads it again.

        Return an empty list. Raises InvalidField for a pinned or configured model, and ModelInUse
        if requests use the model. Raises the errors of `load` too.
        """
        model = self._permitted.find(name)
        if any(pinned.ref == model.ref for pinned in self._permitted.list_kept_loaded()):
            raise InvalidField(
                f"Model {model.ref.id} stays loaded: it is pinned, or listed in "
                "`args.models` of serve_config.yaml",
                field="model",
            )
        remaining = await self._change(model, PoolRequest("unload", model.ref))
        if remaining:
            raise ModelInUse(f"requests use model {model.ref.id} now; unload it afterwards")
        return remaining

    async def _change(self, model: RegisteredModel, request: PoolRequest) -> list[LoadedEntry]:
        """Send `request` to the replicas that can run `model`.

        Returns one entry per replica that has the model in memory afterwards. Raises
        HardwareUnavailable if no replica is connected, else the first error of a replica.
        """
        names = GENERATOR_DEPLOYMENTS if model.is_generative else ENCODER_DEPLOYMENTS
        deployments = [
            name
            for device, name in names.items()
            if name in self._pools and model.manifest.candidate_for(device) is not None
        ]
        states = await self._manage(deployments, request)
        if not states:
            raise HardwareUnavailable(
                f"no replica that can run {model.ref.id} is connected",
                field="model",
            )
        entries = []
        for (deployment, replica), state in states.items():
            if isinstance(state, ServeError):
                raise state
            entries += [
                _describe(deployment, replica, loaded)
                for loaded in state.models
                if loaded.ref == model.ref
            ]
        return entries

    async def _manage(
        self, deployments: Iterable[str], request: PoolRequest
    ) -> dict[tuple[str, str], PoolState | ServeError]:
        names = list(deployments)
        message = f"the replicas did not answer within {TIMEOUT_S:g} s; retry later"
        async with enforce_deadline(deadline_after(TIMEOUT_S), message):
            answers = await asyncio.gather(*(self._pools[name].send(request) for name in names))
        return {
            (name, replica): state
            for name, states in zip(names, answers, strict=True)
            for replica, state in states.items()
        }


def _describe(deployment: str, replica: str, loaded: LoadedModel) -> LoadedEntry:
    return LoadedEntry(
        model=loaded.ref.id,
        version=loaded.ref.version,
        deployment=deployment,
        replica=replica,
        bytes=loaded.bytes,
        pinned=loaded.is_pinned,
        in_use=loaded.leases,
        age_s=round(loaded.age_s, 1),
        idle_s=round(loaded.idle_s, 1),
        requests_per_minute=round(loaded.calls_per_minute, 2),
    )
