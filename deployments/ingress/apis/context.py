"""The dependencies that the ingress hands to every API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from deployments.ingress.pipeline import RequestPipeline

Scrape = Callable[[], Awaitable[str]]  # returns the metrics of the cluster as Prometheus text


class ApiContext(NamedTuple):
    """Constructor argument of every API."""

    pipeline: RequestPipeline
    scrape_metrics: Scrape
