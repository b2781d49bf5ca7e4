"""Environment variables of every Ray node, on a single host and on Kubernetes.

Ray Serve reads these variables once, at import, from the environment of the raylet. They must be
set before Ray starts, with the same values on every node. If controller and replicas have different
values, parts of the cluster fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from deployments.host.gpus import BUS_ORDER, DEVICE_ORDER_VARIABLE

# The ingress logs at most 20 lines a second. With 300 bytes each, its three files hold four hours.
LOG_FILE_BYTES = 32 << 20
FORMER_LOG_FILES = 2
# Variables of RAY_ENVIRONMENT in whose place `hundredfold serve` takes those of its environment.
LOG_LIMIT_VARIABLES = ("RAY_ROTATION_MAX_BYTES", "RAY_ROTATION_BACKUP_COUNT")

# Bytes of Ray's object store, in /dev/shm. Messages between replicas bypass it. Ray's default, 30 %
# of the memory, would leave less for models.
OBJECT_STORE_BYTES = 256 << 20

RAY_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        # Uses HAProxy instead of Serve's Python proxy, for 3 times the requests per second.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # Runs user code on the event loop of the replica, and uses gRPC between replicas.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Number of log lines that are buffered. RAY_SERVE_THROUGHPUT_OPTIMIZED sets 1,000. As the
        # access log is off, warnings would then be written hours late or never.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        # HAProxy threads. One thread is never saturated. Serve's default of 4 threads competes with
        # the engines for cores.
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # Seconds that a replaced HAProxy keeps its connections. The value exceeds the longest
        # request, so that a reload closes no running request.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "300",
        # Seconds that HAProxy waits for a replica to send; Serve's default is unlimited. The value
        # exceeds the timeouts of the ingress, whose errors have the format of the API. Only this
        # timeout ends requests of a hung ingress, because HAProxy turns off Serve's own timeout,
        # `http_options.request_timeout_s` (cluster/edge).
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": "180",
        # Seconds that a client may pause within a request. With Serve's default of 3,600, clients
        # that never complete their request keep connections for an hour.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "180",
        # Repeats a request if the ingress replica ended before it answered. A repeated call has the
        # same effect as one call, except for a rollback, which cluster/edge excludes. HAProxy can
        # only repeat a body that it has buffered, so cluster/edge makes it buffer up to 15 KB.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        # Number of refused connections after which an ingress replica gets no requests until a
        # health check passes. With Serve's default of 3, all retries of a request go to the same
        # dead replica.
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        # Seconds between health checks of the actor that configures HAProxy. Three failed checks
        # replace the actor. With Serve's default of 10, routes would be stale for half a minute.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        # Maximum bytes of a message between replicas. gRPC's default of 4 MiB is less than a
        # micro-batch of 32 calls (`max_batch_size`). One call with a long document in windows takes
        # up to 27 MB.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "1073741824",
        # A rollout stops and keeps the old replicas if new replicas do not start. This is the
        # default of Ray 2.60. It is set explicitly because deployments rely on it.
        "RAY_SERVE_STOP_FAILED_ROLLING_UPDATES": "1",
        # Kills a replica at once if its health checks fail. Serve's default lets the replica drain
        # for `graceful_shutdown_timeout_s`, so a hung ingress would keep its requests for 125 s.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # The raylet ends the process group of a dead worker, including children such as HAProxy.
        "RAY_process_group_cleanup_enabled": "1",
        # Requires Ray's token for dashboard, jobs, GCS and the ports that unpickle messages.
        "RAY_AUTH_MODE": "token",
        # Bytes of a log file until a new one begins, and the number of former ones. Ray's
        # defaults are 512 MiB and 5, 3 GiB per log. What workers print (`worker-*.err`) grows on
        # without a limit unless the first variable is set.
        "RAY_ROTATION_MAX_BYTES": str(LOG_FILE_BYTES),
        "RAY_ROTATION_BACKUP_COUNT": str(FORMER_LOG_FILES),
        # Runs replicas with normal priority. With Ray's default niceness of 15, any other process
        # on the host, such as a log rotation, takes cores from the replicas.
        "RAY_worker_niceness": "0",
        # Stops HAProxy from reporting every request to an actor. The reports cost 3 % of the
        # throughput of two cores, and `GET /metrics` counts the same requests by model and status.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # Milliseconds between flushes of Serve's counters. The default of 100 is needlessly short,
        # because Prometheus scrapes every few seconds.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
        # Seconds between rounds of Serve's controller. The default of 0.1 costs 4 % of a core.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        # Turns off the statistics of Ray's event loops, which only Ray's developers read, in
        # `debug_state.txt`. Each event takes time for them, for example the 100 per second of the
        # main thread of every replica.
        "RAY_event_stats": "0",
        # Milliseconds between reports of finished tasks for Ray's dashboard. With the default of
        # 1,000, each process wakes every second, although Serve's tasks are not reported.
        "RAY_task_events_report_interval_ms": "10000",
        # Turns off the thread pool of `tokenizers`, which is unsafe after a fork. Replicas run
        # tokenizers in their own threads.
        "TOKENIZERS_PARALLELISM": "false",
        # Replicas read sealed artifacts only and never connect to a model hub.
        "HF_HUB_OFFLINE": "1",
        # Orders the GPUs of CUDA as nvidia-smi does. Ray writes an index into CUDA_VISIBLE_DEVICES.
        # CUDA chooses the GPU of a replica by this index, nvidia-smi tells the memory of that GPU.
        DEVICE_ORDER_VARIABLE: BUS_ORDER,
        # Sends no usage statistics to the Ray project.
        "RAY_USAGE_STATS_ENABLED": "0",
    }
)
