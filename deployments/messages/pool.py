"""Messages about the models in the memory of the replicas."""

from __future__ import annotations

from typing import Literal, NamedTuple

from deployments.messages.shared import ModelRef


class LoadedModel(NamedTuple):
    """A model in the memory of a replica, as `hundredfold models ps` shows it."""

    ref: ModelRef
    bytes: int
    is_pinned: bool
    leases: int  # calls that use the model now
    calls_per_minute: float  # estimated calls in the last minute
    age_s: float  # seconds since the load
    idle_s: float  # seconds since the last use


class PoolRequest(NamedTuple):
    """An action on a replica's models. The answer is the PoolState after the action."""

    action: Literal["list", "load", "unload"]
    model: ModelRef | None = None


class PoolState(NamedTuple):
    """The models in the memory of a replica, the most recently used last."""

    models: tuple[LoadedModel, ...]
    bytes: int
    max_bytes: int
