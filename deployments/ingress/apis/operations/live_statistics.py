"""Live figures of GET /stats: requests of this ingress replica, and replicas of the whole cluster.

Records of requests are kept for WINDOW_S. The load of the replicas comes from Ray's metrics agents,
which collect metrics every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from typing_extensions import TypedDict

from deployments.ingress.admission import Admission
from deployments.ingress.apis.shared.context import Scrape
from deployments.ingress.devices.cluster_state import ClusterMonitor, ReplicaTarget
from deployments.ingress.request_log import RequestContext
from deployments.keys.caller import current_caller
from deployments.metrics import PREFIX
from deployments.records import RequestRecord

log = logging.getLogger("ray.serve.hundredfold")

WINDOW_S = 60.0
# Maximum number of kept records. With more requests in WINDOW_S, the window is shorter.
MAX_REQUESTS = 8192
MAX_AGE_S = 1.0  # seconds for which a response is reused
MAX_LOAD_AGE_S = 5.0  # seconds for which the load is reused; parsing takes milliseconds
PERCENTILES = (50, 90, 99)
LOAD = re.compile(rf"^{PREFIX}_(busy_ratio|queued_seconds){{(.*)}} (\S+)$", re.MULTILINE)
NO_MODEL = RequestContext().model  # model of requests that failed before a model was chosen
DEPLOYMENT = re.compile(r'\bdeployment="(\w+)"')


class Percentiles(TypedDict):
    """Percentiles in milliseconds; null without requests."""

    p50: float | None
    p90: float | None
    p99: float | None


class RequestFigures(TypedDict):
    """Requests of the last `window_s` seconds; `failed_ratio` is null without requests."""

    requests_per_s: float
    tokens_per_s: float  # tokens in prompts and answers; status 200 only, no cache hits
    failed_ratio: float | None  # share of requests whose status is not 200
    latency_ms: Percentiles  # requests with status 200 only


class ModelFigures(RequestFigures):
    id: str


class InFlight(TypedDict):
    """Admitted work of this ingress replica that is not answered yet."""

    texts: int
    generations: int


class ScalingFigures(TypedDict):
    """Desired replicas of a deployment and their bounds; all equal without autoscaling."""

    target: int
    min: int
    max: int


class DeploymentFigures(TypedDict):
    """Replicas of a deployment. Their load is null if the metrics lack it or cannot be read."""

    running: int
    starting: int
    scaling: ScalingFigures | None  # null before the first status of Ray Serve
    busy_ratio: float | None  # share of the capacity in use, mean of the replicas
    queued_s: float | None  # predicted seconds of waiting work, maximum of the replicas


class LiveStatistics(RequestFigures):
    """Response of /stats."""

    window_s: float
    ingress_replicas: int
    queue_ms: Percentiles  # wait for an engine thread or a KV slot
    cache_hit_ratio: float | None  # share of the look-ups in the response cache
    in_flight: InFlight
    models: list[ModelFigures]  # models with requests in the window, the busiest first
    deployments: dict[str, DeploymentFigures]


class _Timed(NamedTuple):
    at_s: float
    record: RequestRecord


class RecentRequests:
    """A RequestRecorder that keeps the last WINDOW_S seconds of requests, up to MAX_REQUESTS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: deque[_Timed] = deque(maxlen=MAX_REQUESTS)
        self._started_s = clock()

    def record(self, request: RequestRecord, /) -> None:
        self._requests.append(_Timed(self._clock(), request))

    def read(self) -> tuple[list[RequestRecord], float]:
        """Return the requests of the window, and its length in seconds, at least 1."""
        now_s = self._clock()
        while self._requests and self._requests[0].at_s < now_s - WINDOW_S:
            self._requests.popleft()
        since_s = self._started_s
        if len(self._requests) == MAX_REQUESTS:
            since_s = self._requests[0].at_s
        return [timed.record for timed in self._requests], max(1.0, min(WINDOW_S, now_s - since_s))


class LiveStatisticsReader:
    """Reader that builds the response of /stats at most once in MAX_AGE_S, for all callers."""

    def __init__(
        self,
        recent: RecentRequests,
        monitor: ClusterMonitor,
        admission: Admission,
        scrape: Scrape,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recent = recent
        self._monitor = monitor
        self._admission = admission
        self._scrape = scrape
        self._clock = clock
        self._answer: LiveStatistics | None = None
        self._answer_expires_s = 0.0
        self._load: Mapping[str, Mapping[str, Sequence[float]]] = {}
        self._load_expires_s = 0.0
        self._reading = asyncio.Lock()

    async def read(self) -> LiveStatistics:
        async with self._reading:
            if self._answer is None or self._clock() >= self._answer_expires_s:
                if self._clock() >= self._load_expires_s:
                    await self._read_load()
                self._answer = self._build()
                self._answer_expires_s = self._clock() + MAX_AGE_S
            return self._answer

    async def _read_load(self) -> None:
        """Read the load again.

        The next read is MAX_LOAD_AGE_S later. If this read fails, the load is unknown until then.
        If this read is cancelled, the next request reads the load.
        """
        self._load_expires_s = self._clock() + MAX_LOAD_AGE_S
        try:
            self._load = read_load(await self._scrape())
        except asyncio.CancelledError:  # the client has left
            self._load_expires_s = 0.0
            raise
        except Exception:
            log.warning("reading the load of the replicas failed", exc_info=True)
            self._load = {}

    def _build(self) -> LiveStatistics:
        requests, seconds = self._recent.read()
        by_model: defaultdict[str, list[RequestRecord]] = defaultdict(list)
        for request in requests:
            if request.model != NO_MODEL:
                by_model[request.model].append(request)
        queued = [r.timings.queue_s for r in requests if r.status == 200 and r.cache != "hit"]
        hits = [request.cache == "hit" for request in requests if request.cache != "none"]
        busiest = sorted(by_model.items(), key=lambda item: -len(item[1]))
        return {
            **summarize(requests, seconds),
            "window_s": round(seconds, 1),
            "ingress_replicas": self._monitor.count_ingress_replicas(),
            "queue_ms": percentiles(queued),
            "cache_hit_ratio": sum(hits) / len(hits) if hits else None,
            "in_flight": {
                "texts": self._admission.items.used,
                "generations": self._admission.generations.used,
            },
            "models": [{"id": id, **summarize(some, seconds)} for id, some in busiest],
            "deployments": self._describe_deployments(),
        }

    def _describe_deployments(self) -> dict[str, DeploymentFigures]:
        snapshot = self._monitor.snapshot
        busy, queued = (self._load.get(name, {}) for name in ("busy_ratio", "queued_seconds"))
        return {
            name: {
                "running": running,
                "starting": snapshot.starting.get(name, 0),
                "scaling": _describe_scaling(snapshot.targets.get(name)),
                "busy_ratio": float(np.mean(busy[name])) if name in busy else None,
                "queued_s": max(queued[name]) if name in queued else None,
            }
            for name, running in snapshot.running.items()
        }


def permitted_statistics(statistics: LiveStatistics) -> LiveStatistics:
    """Remove the models that the caller's key does not permit."""
    may_use = current_caller().may_use_model
    models = [model for model in statistics["models"] if may_use(model["id"])]
    return {**statistics, "models": models}


def _describe_scaling(replicas: ReplicaTarget | None) -> ScalingFigures | None:
    if replicas is None:
        return None
    return {"target": replicas.target, "min": replicas.min, "max": replicas.max}


def summarize(requests: Sequence[RequestRecord], seconds: float) -> RequestFigures:
    answered = [request for request in requests if request.status == 200]
    tokens = sum(request.timings.tokens for request in answered if request.cache != "hit")
    return {
        "requests_per_s": len(requests) / seconds,
        "tokens_per_s": tokens / seconds,
        "failed_ratio": 1 - len(answered) / len(requests) if requests else None,
        "latency_ms": percentiles([request.total_s for request in answered]),
    }


def percentiles(seconds: Sequence[float]) -> Percentiles:
    if not seconds:
        return {"p50": None, "p90": None, "p99": None}
    p50, p90, p99 = (round(float(ms), 3) for ms in np.percentile(seconds, PERCENTILES) * 1e3)
    return {"p50": p50, "p90": p90, "p99": p99}


def read_load(exposition: str) -> dict[str, dict[str, list[float]]]:
    """Read the load of all replicas from Prometheus text: values by metric, then by deployment."""
    values: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for metric, labels, value in LOAD.findall(exposition):
        if found := DEPLOYMENT.search(labels):
            values[metric][found[1]].append(float(value))
    return {metric: dict(by_name) for metric, by_name in values.items()}
