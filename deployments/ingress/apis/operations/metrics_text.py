"""Prometheus text of the whole cluster, scraped from the metrics agent of Ray on each node.

An agent has only the metrics of its node. Scraping all agents makes the result independent of the
ingress replica that answers.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from deployments.artifacts.types import TaskName
from deployments.metrics import PREFIX

STATUS = re.compile(r'\bstatus="(\d+)"')


@dataclass(frozen=True, slots=True)
class MetricAlias:
    """A second name of a metric.

    `label` gets the labels of a sample. It returns a label to add, an empty string to add none, or
    None to drop the sample.
    """

    name: str
    source: str
    kind: str
    description: str
    label: Callable[[str], str | None] = lambda _labels: ""

    def lines(self, exposition: str) -> Iterator[str]:
        """Yield the samples of the metric under the name of the alias."""
        sample = re.compile(rf"^{self.source}((?:_bucket|_sum|_count)?)(?:{{(.*)}})? (\S+)$", re.M)
        for suffix, labels, value in sample.findall(exposition):
            added = self.label(labels)
            if added is not None:
                yield f"{self.name}{suffix}{{{added}{labels}}} {value}"


def add_aliases(exposition: str) -> str:
    """Append copies of metrics under the names that TEI and TGI, Hugging Face's servers, use."""
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
    match = STATUS.search(labels)
    return int(match[1]) if match else 200


def _of_task(task: TaskName, *, only_success: bool = False) -> Callable[[str], str | None]:
    def label(labels: str) -> str | None:
        if f'task="{task}"' not in labels or (only_success and _status(labels) != 200):
            return None
        return ""

    return label


def _list_task_aliases(name: str, task: TaskName) -> Iterator[MetricAlias]:
    """Yield the aliases for the requests of one task, such as `te_embed_count`."""
    requests, seconds = f"{PREFIX}_requests_total", f"{PREFIX}_request_seconds"
    about = f"Requests for {task}"
    yield MetricAlias(f"te_{name}_count", requests, "counter", about, _of_task(task))
    yield MetricAlias(
        f"te_{name}_success",
        requests,
        "counter",
        f"{about} with status 200",
        _of_task(task, only_success=True),
    )
    yield MetricAlias(
        f"te_{name}_duration",
        seconds,
        "histogram",
        f"Seconds of a request for {task} in the ingress",
        _of_task(task),
    )


ALIASES = (
    MetricAlias("te_request_count", f"{PREFIX}_requests_total", "counter", "Requests"),
    MetricAlias(
        "te_request_success",
        f"{PREFIX}_requests_total",
        "counter",
        "Requests with status 200",
        _only_success,
    ),
    MetricAlias(
        "te_request_failure",
        f"{PREFIX}_requests_total",
        "counter",
        "Failed requests by cause: validation, overloaded or inference",
        _reason_of_failure,
    ),
    MetricAlias(
        "te_request_duration",
        f"{PREFIX}_request_seconds",
        "histogram",
        "Seconds of a request in the ingress",
    ),
    MetricAlias(
        "te_batch_next_size", f"{PREFIX}_batch_items", "histogram", "Items in a forward pass"
    ),
    MetricAlias(
        "te_queue_size",
        f"{PREFIX}_waiting_items",
        "gauge",
        "Queued texts at the end of a forward pass",
    ),
    *_list_task_aliases("embed", TaskName.FEATURE_EXTRACTION),
    *_list_task_aliases("predict", TaskName.TEXT_CLASSIFICATION),
    MetricAlias(
        "tgi_queue_size",
        f"{PREFIX}_waiting_requests",
        "gauge",
        "Requests waiting for a KV slot",
    ),
)

AGENT_PREFIX = f"ray_{PREFIX}_"
AGENT_TIMEOUT_S = 2.0
MAX_AGE_S = 1.0  # how long a scrape is reused; the agents collect only every few seconds
# The agents are inside the cluster, so the proxy settings of the environment do not apply.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Labels of Ray that say nothing about requests, so they are removed. `WorkerId` becomes `replica`,
# which separates the series of two replicas.
AGENT_LABELS = re.compile(r'\b(?:Component|NodeAddress|SessionName|Version|otel_\w+)="[^"]*",?')


class SharedScrape:
    """Scrape whose result all callers share. It runs at most once in MAX_AGE_S."""

    def __init__(self, scrape: Callable[[], Awaitable[str]]) -> None:
        self._scrape = scrape
        self._lock = asyncio.Lock()
        self._text = ""
        self._expires_s = 0.0  # time.monotonic

    async def __call__(self) -> str:
        async with self._lock:
            if time.monotonic() >= self._expires_s:
                self._text = await self._scrape()
                self._expires_s = time.monotonic() + MAX_AGE_S
            return self._text


async def scrape_ray() -> str:
    """Return this project's metrics of all live nodes, with the aliases.

    Skip nodes whose agent does not respond.
    """
    urls = await asyncio.to_thread(_agent_urls)
    texts = await asyncio.gather(*(asyncio.to_thread(_fetch, url) for url in urls))
    return add_aliases(merge_expositions(texts))


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
    """Merge this project's metrics. Each metric has one HELP and one TYPE, then all samples."""
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    metric = ""
    for line in (line for text in expositions for line in text.splitlines()):
        if line.startswith(("# HELP ", "# TYPE ")):
            line = line.replace(AGENT_PREFIX, f"{PREFIX}_")
            metric = line.split(" ", 3)[2]
            header = headers.setdefault(metric, [])
            if line not in header:
                header.append(line)
        elif line.startswith(AGENT_PREFIX):
            sample = AGENT_LABELS.sub("", line.removeprefix("ray_")).replace(
                "WorkerId=", "replica="
            )
            samples.setdefault(metric, []).append(sample)
    lines = [line for name, rows in samples.items() for line in (*headers.get(name, ()), *rows)]
    return "\n".join(lines) + "\n"
