"""The dependencies that the ingress hands to every API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from deployments.ingress.builds import BuildService
from deployments.ingress.pipeline import RequestPipeline
from deployments.ingress.replica_memory import ReplicaMemory

Scrape = Callable[[], Awaitable[str]]  # returns the metrics of the cluster as Prometheus text


class ModelServices(NamedTuple):
    """Services that manage models: builds, and the models in the memory of the replicas."""

    builds: BuildService
    memory: ReplicaMemory


class ApiContext(NamedTuple):
    """Constructor argument of every API."""

    pipeline: RequestPipeline
    scrape_metrics: Scrape
    services: ModelServices
