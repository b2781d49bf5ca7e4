"""Environment of every Ray node, for a single host and for Kubernetes.

Ray Serve reads its switches once, at import, from the environment of the raylet. They must be set
before Ray starts, with the same values on every node. If controller and replicas disagree, parts of
the cluster fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RAY_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        # HAProxy per node instead of Serve's Python proxy: 3 times the requests per second.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # Runs user code on the event loop of the replica; gRPC between replicas.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Log lines buffered before they are written. RAY_SERVE_THROUGHPUT_OPTIMIZED sets 1,000;
        # with the access log off, warnings would then be written hours late or never.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        # Threads. Serve's default of 4 competes with the engines for cores; one is never saturated.
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # s that a replaced HAProxy keeps its connections. Longer than the longest request, so that
        # a reload closes no running request.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "300",
        # s that HAProxy waits for a replica. Serve's default is unlimited. Longer than
        # `http_options.request_timeout_s`, so that the replica returns the error.
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": "180",
        # s that a client may pause within a request. Serve's default of 3,600 keeps the connections
        # of clients that never complete their request.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "180",
        # Repeats a request if the ingress replica ended before it answered. Calls are idempotent.
        # HAProxy repeats what it still holds: the edge collects up to 15 KB of a body first.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        # Refused connections after which an ingress replica gets no requests until a health check
        # passes. With Serve's default of 3 all retries of a request go to the same dead replica.
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        # s between health checks of the actor that configures HAProxy; after three it is replaced.
        # With Serve's default of 10 the routes would be stale for half a minute.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        # Bytes of one message between replicas. gRPC's default of 4 MiB is less than a micro-batch
        # of 32 calls (`max_batch_size`). One call with a long document in windows takes up to
        # 27 MB.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "1073741824",
        # A rollout stops and keeps the old replicas if new ones do not start. Equal to the default
        # of Ray 2.60; set because deployments rely on it.
        "RAY_SERVE_STOP_FAILED_ROLLING_UPDATES": "1",
        # A replica that fails its health check is killed at once. Serve's default lets it drain for
        # `graceful_shutdown_timeout_s`: a hung ingress would keep its requests for 125 s.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # The raylet ends the process group of a dead worker, including children such as HAProxy.
        "RAY_process_group_cleanup_enabled": "1",
        # Dashboard, jobs, GCS and the ports that unpickle messages require Ray's token.
        "RAY_AUTH_MODE": "token",
        # Normal priority. With Ray's default niceness of 15 any other process on the host, such as
        # a log rotation, takes the cores from the replicas.
        "RAY_worker_niceness": "0",
        # Reporting every request of HAProxy to an actor costs 3 % of the throughput of two cores.
        # `GET /metrics` counts the same requests by model and status.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # ms between flushes of Serve's counters; Prometheus scrapes every few seconds.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
        # s between two rounds of Serve's controller; the default of 0.1 costs 4 % of a core.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        # Tokenizers run in threads of the replica; the library's own pool is unsafe after a fork.
        "TOKENIZERS_PARALLELISM": "false",
        # Replicas read sealed artifacts only and never connect to a model hub.
        "HF_HUB_OFFLINE": "1",
        # Sends no usage statistics to the Ray project.
        "RAY_USAGE_STATS_ENABLED": "0",
    }
)
