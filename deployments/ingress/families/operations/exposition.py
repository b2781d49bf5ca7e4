"""Prometheus text of the whole cluster, gathered from Ray's metrics agent on every node.

Each agent knows its own node's processes; asked together they give the same answer whichever
ingress replica serves the scrape.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import urllib.request
from collections.abc import Awaitable, Callable, Iterable

from deployments.ingress.families.operations.te_names import with_te_names
from deployments.metrics import PREFIX

Gather = Callable[[], Awaitable[str]]

AGENT_PREFIX = f"ray_{PREFIX}_"
AGENT_TIMEOUT_S = 2.0
# Agents are the cluster's own; a proxy from the environment has no business here.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Labels of Ray's own that tell nothing about a request. `WorkerId` stays, as `replica`: it keeps
# the series of two replicas apart.
AGENT_LABELS = re.compile(r'\b(?:Component|NodeAddress|SessionName|Version|otel_\w+)="[^"]*",?')


async def gather_from_ray() -> str:
    """Our metrics from every live node; a node that does not answer is left out."""
    urls = await asyncio.to_thread(_agent_urls)
    texts = await asyncio.gather(*(asyncio.to_thread(_fetch, url) for url in urls))
    return with_te_names(merge(texts))


def _agent_urls() -> list[str]:
    import ray

    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"] and node.get("MetricsExportPort")
    ]


def _fetch(url: str) -> str:
    try:
        with DIRECT.open(url, timeout=AGENT_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
            return text
    except (OSError, http.client.HTTPException, UnicodeDecodeError):
        return ""


def merge(expositions: Iterable[str]) -> str:
    """Our families out of several texts: one HELP and TYPE each, then all samples."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    family = ""
    for line in (line for text in expositions for line in text.splitlines()):
        if line.startswith(("# HELP ", "# TYPE ")):
            line = line.replace(AGENT_PREFIX, f"{PREFIX}_")
            family = line.split(" ", 3)[2]
            head = heads.setdefault(family, [])
            if line not in head:
                head.append(line)
        elif line.startswith(AGENT_PREFIX):
            plain = AGENT_LABELS.sub("", line.removeprefix("ray_")).replace("WorkerId=", "replica=")
            samples.setdefault(family, []).append(plain)
    lines = [line for name, rows in samples.items() for line in (*heads.get(name, ()), *rows)]
    return "\n".join(lines) + "\n"
