"""Harness of the edge, the supervisor of one host's HAProxy, without a cluster.

Ray Serve's HAProxy code configures the edge, and an HTTP server acts as the ingress replica.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

import httpx
import psutil
import pytest
from ray.serve._private import haproxy
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from cluster.edge.supervisor import Edge, EdgeSettings
from cluster.environment import RAY_ENVIRONMENT
from cluster.launcher.local_environment import find_haproxy, local_environment
from cluster.launcher.local_ports import LocalPorts
from cluster.ports import open_listener
from deployments.request_headers import ARRIVAL_HEADER, REFUSAL_HEADER
from tests.support.ports import free_port
from tests.support.waiting import wait_for

APP = "http-app"
SERVE_HEALTH = "/-/healthz"
# Answer of Ray Serve's proxy and replicas to a path without a route.
NOT_ROUTED = b"Path '/unrouted' not found. Ping http://.../-/routes for available routes."
HOLD = b"hold"  # body of requests to `/places` whose responses wait

T = TypeVar("T")


class Backend(ThreadingHTTPServer):
    """HTTP server that acts as an ingress replica."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _BackendHandler)
        self.seen: list[str] = []
        self.arrivals_ms: list[list[str]] = []  # arrival headers of each request in `seen`
        self.left = threading.Event()  # set when a client disconnects from `/slow`
        self.retry_after = "7"  # `retry-after` header of rejections
        self.places = threading.Semaphore(4)  # `/places` accepts 4 requests at a time
        self.answers = threading.Semaphore(0)  # each response to a HOLD waits for one release
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors, because health checks reset their connections."""


class _BackendHandler(BaseHTTPRequestHandler):
    server: Backend
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/slow":
            self.server.seen.append(self.path)
            self._wait_until_left()
        self._answer(self.path.encode())

    def do_POST(self) -> None:
        size = int(self.headers["content-length"])
        self.server.seen.append(self.path)
        self.server.arrivals_ms.append(self.headers.get_all(ARRIVAL_HEADER, []))
        body = self.rfile.read(size)
        if self.path == "/die" or (
            self.path == "/die-once" and self.server.seen.count(self.path) == 1
        ):
            self.close_connection = True
            return
        if self.path == "/slow":
            self._wait_until_left()
        if self.path == "/full":
            self._refuse()
        elif self.path == "/unrouted":
            self._answer(NOT_ROUTED, 404, {"content-type": "text/plain; charset=utf-8"})
        elif self.path == "/unknown":
            self._answer(b"Not Found", 404, {"content-type": "text/plain; charset=utf-8"})
        elif self.path == "/places":
            self._answer_in_a_place(body)
        elif self.path == "/limited":
            self._answer(b"limited", 429)
        else:
            self._answer(body)

    def _refuse(self) -> None:
        self._answer(b"full", 429, {REFUSAL_HEADER: "1", "retry-after": self.server.retry_after})

    def _answer_in_a_place(self, body: bytes) -> None:
        if not self.server.places.acquire(blocking=False):
            self._refuse()
            return
        if body == HOLD:
            self.server.answers.acquire(timeout=20)
        self.server.places.release()
        self._answer(body)

    def _wait_until_left(self) -> None:
        with suppress(ConnectionResetError):
            self.connection.settimeout(20)
            self.connection.recv(1)
        self.server.left.set()

    def _answer(self, body: bytes, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


class EdgeHarness:
    """An edge on a free port, Ray Serve's HAProxy manager, and the reports of the edge."""

    def __init__(
        self, directory: Path, settings: EdgeSettings, patch: pytest.MonkeyPatch, host: str
    ) -> None:
        self.backend = Backend(free_port())  # tests close it, and open another one on its port
        self.port = free_port()
        self.reports: list[str] = []
        # The default ports would collide with those of a harness in another test process.
        self.ports = LocalPorts(*(free_port() for _ in fields(LocalPorts)))
        self._listener = open_listener(host, self.port)
        haproxy_path = find_haproxy()
        self.grpc_port = free_port()
        self._grpc_listener = open_listener(host, self.grpc_port)
        self.edge = Edge(
            directory,
            self._listener,
            haproxy_path,
            self.reports.append,
            settings,
            self._grpc_listener,
        )
        self.environment = local_environment(edge=directory)
        for name, value in self.environment.items():
            patch.setenv(name, value)
        wrapper = self.environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
        patch.setattr(haproxy, "RAY_SERVE_HAPROXY_BINARY_PATH", wrapper)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.manager = self.new_manager()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def new_manager(self) -> HAProxyApi:
        """Build the manager of a new HAProxyManager actor, whose routing table is empty."""
        files = Path(self.environment["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"])
        return build_manager(files, self.port, self.ports)

    def start_manager(self) -> None:
        self._run(self.manager.start())

    def route(self, *ports: int, health_path: str = SERVE_HEALTH) -> None:
        """Route to replicas at these ports, in place of Serve's controller.

        `health_path` is for a replica without the health check of Serve.
        """
        set_routes(self.manager, *ports, health_path=health_path)
        self._run(self.manager.reload())

    def is_healthy(self) -> bool:
        """Return the result of Ray Serve's health check of the manager."""
        return bool(self._run(self.manager.is_running()))

    def replace_manager(self) -> None:
        """Kill the manager's child `attach.py`, and build a new manager.

        The death of the manager's actor has the same effect.
        """
        assert self.manager._proc is not None
        self.manager._proc.kill()
        self._run(self.manager._proc.wait())
        self.manager = self.new_manager()

    def haproxies(self) -> list[psutil.Process]:
        """Return the HAProxy processes, including old ones that drain connections."""
        found = []
        for process in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):  # it was on trial and has ended
                if process.name() == "haproxy":
                    found.append(process)
        return found

    def wait_for_one(self) -> None:
        """Wait until only the HAProxy with the last routes is left."""
        wait_for(lambda: len(self.haproxies()) == 1)

    def kill_haproxies(self) -> None:
        """Kill them and wait for their ends. A dying process may accept and lose connections."""
        killed = self.haproxies()
        for process in killed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_for(lambda: all(map(has_ended, killed)))

    def post(
        self, path: str = "/echo", body: bytes = b"text", headers: Mapping[str, str] = {}
    ) -> httpx.Response:
        """Send a POST on a new connection. Load no certificates, which takes tens of ms."""
        return httpx.post(self.url + path, content=body, headers=headers, timeout=20, verify=False)

    def close(self) -> None:
        if self.manager._proc is not None:
            self._run(self.manager.stop())
        self.edge.stop()
        self._listener.close()
        self._grpc_listener.close()
        self.backend.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)


def has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def build_manager(files: Path, port: int, ports: LocalPorts) -> HAProxyApi:
    """Build the part of HAProxyManager that runs HAProxy on `port`, with its files in `files`."""
    return HAProxyApi(
        HAProxyConfig(
            http_options=HTTPOptions(host="127.0.0.1", port=port),
            socket_path=str(files / "admin.sock"),
            server_state_base=str(files),
            server_state_file=str(files / "server-state"),
            metrics_port=ports.metrics,
            stats_port=ports.haproxy_stats,
            is_head=True,
            enable_hap_optimization=True,
            metrics_enabled=False,
            retry_on=RAY_ENVIRONMENT["RAY_SERVE_HAPROXY_RETRY_ON"],
            observe_error_limit=int(RAY_ENVIRONMENT["RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT"]),
            timeout_client_s=20,
            timeout_server_s=20,
            health_check_downinter="50ms",
            health_check_fastinter="50ms",
        ),
        config_file_path=str(files / "haproxy.cfg"),
    )


def set_routes(manager: HAProxyApi, *ports: int, health_path: str = SERVE_HEALTH) -> None:
    """Configure the manager with an application that has replicas at these ports."""
    servers = [ServerConfig(f"replica-{port}", "127.0.0.1", port) for port in ports]
    backend = BackendConfig(
        name=APP,
        path_prefix="/",
        servers=servers,
        app_name="app",
        http_health_check_path=health_path,
    )
    manager.set_backend_configs({APP: backend})


@contextmanager
def run_harness(
    directory: Path, settings: EdgeSettings | None = None, host: str = "127.0.0.1"
) -> Iterator[EdgeHarness]:
    """Run an edge on `host` that serves 503 until the manager starts."""
    with pytest.MonkeyPatch.context() as patch:
        harness = EdgeHarness(directory, settings or EdgeSettings(), patch, host)
        try:
            harness.edge.start()
            yield harness
        finally:
            harness.close()
