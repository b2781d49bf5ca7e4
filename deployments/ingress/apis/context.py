"""The dependencies that the ingress hands to every API."""

from __future__ import annotations

from typing import NamedTuple

from deployments.ingress.apis.operations.metrics_text import Scrape
from deployments.ingress.pipeline import RequestPipeline


class ApiContext(NamedTuple):
    """Constructor argument of every API."""

    pipeline: RequestPipeline
    scrape_metrics: Scrape
