"""Prometheus text of the whole cluster, gathered from Ray's metrics agent on every node.

Each agent knows its own node's processes; asked together they give the same answer whichever
ingress replica serves the scrape.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from deployments.metrics import PREFIX

STATUS = re.compile(r'\bstatus="(\d+)"')


@dataclass(frozen=True, slots=True)
class MetricAlias:
    """One family under another name; `label` may drop a sample (None) or add a label to it."""

    name: str
    source: str
    kind: str
    description: str
    label: Callable[[str], str | None] = lambda _labels: ""

    def lines(self, exposition: str) -> Iterator[str]:
        """The samples under the new name, with the labels they have."""
        sample = re.compile(rf"^{self.source}((?:_bucket|_sum|_count)?)(?:{{(.*)}})? (\S+)$", re.M)
        for suffix, labels, value in sample.findall(exposition):
            own = self.label(labels)
            if own is not None:
                yield f"{self.name}{suffix}{{{own}{labels}}} {value}"


def add_tei_aliases(exposition: str) -> str:
    """The text, and behind it the families that have an alias."""
    lines: list[str] = []
    for alias in ALIASES:
        if samples := list(alias.lines(exposition)):
            lines += (
                f"# HELP {alias.name} {alias.description}",
                f"# TYPE {alias.name} {alias.kind}",
                *samples,
            )
    return exposition + "".join(f"{line}\n" for line in lines)


def _only_success(labels: str) -> str | None:
    return "" if _status(labels) == 200 else None


def _reason_of_failure(labels: str) -> str | None:
    status = _status(labels)
    if status == 200:
        return None
    if status == 429:
        return 'err="overloaded",'
    return 'err="validation",' if status < 500 else 'err="inference",'


def _status(labels: str) -> int:
    found = STATUS.search(labels)
    return int(found[1]) if found else 200


ALIASES = (
    MetricAlias("te_request_count", f"{PREFIX}_requests_total", "counter", "Requests"),
    MetricAlias(
        "te_request_success",
        f"{PREFIX}_requests_total",
        "counter",
        "Requests that were answered",
        _only_success,
    ),
    MetricAlias(
        "te_request_failure",
        f"{PREFIX}_requests_total",
        "counter",
        "Requests that failed: by the client, for want of room, or here",
        _reason_of_failure,
    ),
    MetricAlias(
        "te_request_duration",
        f"{PREFIX}_request_seconds",
        "histogram",
        "Whole request inside the ingress, seconds",
    ),
    MetricAlias(
        "te_batch_next_size", f"{PREFIX}_batch_items", "histogram", "Items in a forward pass"
    ),
    MetricAlias(
        "te_queue_size", f"{PREFIX}_waiting_items", "gauge", "Texts waiting when a pass ended"
    ),
)

Scrape = Callable[[], Awaitable[str]]

AGENT_PREFIX = f"ray_{PREFIX}_"
AGENT_TIMEOUT_S = 2.0
# Agents are the cluster's own; a proxy from the environment has no business here.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Labels of Ray's own that tell nothing about a request. `WorkerId` stays, as `replica`: it keeps
# the series of two replicas apart.
AGENT_LABELS = re.compile(r'\b(?:Component|NodeAddress|SessionName|Version|otel_\w+)="[^"]*",?')


async def scrape_ray() -> str:
    """Our metrics from every live node; a node that does not answer is left out."""
    urls = await asyncio.to_thread(_agent_urls)
    texts = await asyncio.gather(*(asyncio.to_thread(_fetch, url) for url in urls))
    return add_tei_aliases(merge_expositions(texts))


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


def merge_expositions(expositions: Iterable[str]) -> str:
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
