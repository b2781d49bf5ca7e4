"""Usage per API key, summed over the ingress replicas of the whole cluster.

The usage is read from the metrics of all replicas, which count from the start of their processes.
Prometheus keeps the history.
"""

from __future__ import annotations

import re
from collections import defaultdict

from pydantic import BaseModel

from deployments.metrics import PREFIX

SAMPLE = re.compile(rf"^{PREFIX}_key_(requests|tokens|compute_seconds)_total{{(.*)}} (\S+)$", re.M)
LABEL = re.compile(r'(\w+)="([^"]*)"')


class KeyUsage(BaseModel):
    """Usage of one key since the start of the ingress replicas."""

    name: str
    requests: dict[str, int]  # by status
    tokens: int
    seconds: dict[str, float]  # compute time by hardware: cpu or gpu


class _KeyCounts:
    def __init__(self) -> None:
        self.requests: defaultdict[str, float] = defaultdict(float)
        self.tokens = 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, kind: str, labels: dict[str, str], value: float) -> None:
        if kind == "requests":
            self.requests[labels["status"]] += value
        elif kind == "tokens":
            self.tokens += value
        else:
            self.seconds[labels["compute"].partition("-")[0]] += value


def read_usage(exposition: str) -> list[KeyUsage]:
    """Return the usage of every key in Prometheus text, sorted by key name."""
    counts: defaultdict[str, _KeyCounts] = defaultdict(_KeyCounts)
    for kind, text, value in SAMPLE.findall(exposition):
        labels = dict(LABEL.findall(text))
        counts[labels["key"]].add(kind, labels, float(value))
    return [
        KeyUsage(
            name=name,
            requests={status: round(n) for status, n in sorted(key.requests.items())},
            tokens=round(key.tokens),
            seconds={device: round(s, 3) for device, s in sorted(key.seconds.items())},
        )
        for name, key in sorted(counts.items())
    ]
