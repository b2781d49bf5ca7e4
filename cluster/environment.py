"""The environment every Ray node runs in: one source for one box and for Kubernetes.

Ray Serve reads its switches once, at import, from the environment of the raylet. They count only
if they are there before Ray starts, with the same values on every node; a cluster in which the
controller and a replica disagree works by halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RAY_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        # A real HAProxy per node instead of Serve's Python proxy: 3 times the requests per second.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # User code on the replica's own loop, gRPC between replicas.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Lines kept back before they are written. The former would make it 1,000, for the line of
        # every request that we do not write; warnings would come hours late, or never.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        # Threads. Serve's 4 would fight the engine for cores; one forwards more than we compute.
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # Seconds a replaced HAProxy keeps its connections; above the longest legal request, so
        # that a reload cuts nothing.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "300",
        # Seconds HAProxy waits for a replica. Serve sets no limit at all; this one lies above
        # `http_options.request_timeout_s`, so that the replica is the one that answers.
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": "180",
        # Seconds a client may be silent in the middle of its request. Serve's 3,600 would keep the
        # connections of all who never send the rest.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "180",
        # Bytes of one message between replicas. gRPC's own 4 MiB is less than a full list: 32 calls
        # (`max_batch_size`), the largest of which, a long document in windows, take 27 MB.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "1073741824",
        # A rollout whose new replicas do not start halts and keeps the old ones. Also the default
        # of Ray 2.60; stated because we rely on it.
        "RAY_SERVE_STOP_FAILED_ROLLING_UPDATES": "1",
        # The raylet ends the whole process group of a dead worker, children such as HAProxy too.
        "RAY_process_group_cleanup_enabled": "1",
        # Dashboard, jobs, GCS and the unpickling ports between replicas ask for Ray's token.
        "RAY_AUTH_MODE": "token",
        # Replicas run at normal priority. Ray's default of 15 lets anything else on the machine,
        # down to a log rotation, take the cores from requests that people wait for.
        "RAY_worker_niceness": "0",
        # HAProxy tells an actor of every request so that Serve can count it, 3 % of the throughput
        # of two cores; `GET /metrics` counts the same requests, by model and status.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # Milliseconds between flushes of Serve's own counters; Prometheus asks every few seconds.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
        # Seconds between two rounds of Serve's controller; its 0.1 costs 4 % of a core.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        # Tokenizers run in our threads; the library's own pool would fork trouble and fight them.
        "TOKENIZERS_PARALLELISM": "false",
        # Serving reads sealed artifacts only; nothing may reach for a model hub.
        "HF_HUB_OFFLINE": "1",
        # No report to Ray's makers.
        "RAY_USAGE_STATS_ENABLED": "0",
    }
)
