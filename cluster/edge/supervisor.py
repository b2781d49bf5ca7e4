"""Supervisor of the HAProxy of a host, in a thread of the launcher.

    Serve's HAProxyManager ── attach.py ──(configuration)──> Edge ──> HAProxy on the listener
              └──(admin commands)──> relay of the edge ─────────────────┘

By default, Ray Serve makes HAProxy a child of an actor. The port then closes when the actor or
HAProxy ends, and a new actor starts with an empty routing table. Here the launcher owns the
listening socket, and HAProxy is a child of the launcher. If HAProxy ends, it is restarted with the
same configuration. Connections wait in the backlog of the socket meanwhile. If the actor ends,
HAProxy keeps serving. The edge ignores the empty table of the new actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from cluster.edge.certificate import CertificateFiles
from cluster.edge.error_files import write_errors
from cluster.edge.grpc_frontend import GrpcFrontend
from cluster.edge.haproxy_config import (
    METRICS_HOST,
    ClientLimits,
    EdgePaths,
    build_starting_config,
    edit_for_host,
    find_admin_socket,
    find_state_file,
    has_routes,
)
from cluster.edge.haproxy_process import EdgeError, HaproxyFiles, HaproxyProcess
from deployments.errors import ServeError

HEALTH_PERIOD_S = 0.5
# A hang costs less than 2 s: one period, two timeouts, and the start of a new HAProxy.
HEALTH_TIMEOUT_S = 0.5
RETRY_S = 0.2  # pause between failed starts of HAProxy
RENEWAL_S = 10.0  # interval between reads of the certificate
PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

ConnectionHandler = Callable[
    [asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]
]
BuildConfig = Callable[[EdgePaths], str]


class EdgeSettings(NamedTuple):
    """What operators choose about the edge."""

    limits: ClientLimits = ClientLimits()
    metrics_host: str = METRICS_HOST
    certificate: CertificateFiles | None = None  # None: HTTP without TLS


class _Attached(NamedTuple):
    """The `attach.py` process that represents HAProxy in Ray Serve, and its connection."""

    number: int  # order of connection
    pid: int
    writer: asyncio.StreamWriter


class Edge:
    """Supervisor of the HAProxy on `listener`. Its thread calls `report` with progress lines.

    With `grpc_listener`, HAProxy serves gRPC there.
    """

    def __init__(
        self,
        directory: Path,
        listener: socket.socket,
        haproxy: str,
        report: Callable[[str], None],
        settings: EdgeSettings,
        grpc_listener: socket.socket | None = None,
    ) -> None:
        self.directory = directory  # private; holds sockets, configurations and HAProxy's log
        self._listener = listener
        self._haproxy = haproxy
        self._report = report
        self._limits = settings.limits
        self._metrics_host = settings.metrics_host
        self._errors = write_errors(directory)
        self._grpc = (
            None
            if grpc_listener is None
            else GrpcFrontend(grpc_listener, directory, settings.limits)
        )
        self._certificate = settings.certificate
        self._pem = b""  # content of the certificate in use
        self._generation = 0
        self._routes = ""  # last applied configuration from Ray Serve
        self._build: BuildConfig = self._build_starting_config
        self._current: HaproxyProcess | None = None
        self._processes: dict[HaproxyProcess, asyncio.Task[None]] = {}  # including draining ones
        self._attached: _Attached | None = None
        self._connections = 0  # number of connections from `attach.py` processes so far
        self._newest = 0  # highest number of a process that has attached
        self._servers: dict[Path, asyncio.Server] = {}
        self._checks: list[asyncio.Task[None]] = []
        # Allows one start of HAProxy at a time, and one change of the applied configuration.
        self._changing = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="edge", daemon=True)

    def start(self) -> None:
        """Start HAProxy, which serves 503 until Ray Serve attaches.

        Raises UnusableCertificate, or EdgeError if HAProxy does not start.
        """
        self._thread.start()
        self._call(self._start())

    def stop(self) -> None:
        """Kill HAProxy and end the thread of the edge."""
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def is_attached(self) -> bool:
        """Whether Ray Serve is attached and configures this HAProxy."""
        return self._attached is not None

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self) -> None:
        if self._certificate is not None:
            self._pem = self._certificate.read()
            self._certificate.check(self._pem)
        await self._listen(control_socket(self.directory), self._attach)
        async with self._changing:
            await self._replace(self._build, self._pem)
        self._checks.append(asyncio.create_task(self._check_health()))
        if self._certificate is not None:
            self._checks.append(asyncio.create_task(self._follow_renewals(self._certificate)))

    def _build_starting_config(self, paths: EdgePaths) -> str:
        return build_starting_config(paths, self._limits) + self._build_grpc(paths)

    def _build_grpc(self, paths: EdgePaths, routed: str = "") -> str:
        return "" if self._grpc is None else self._grpc.build(paths.certificate, routed)

    async def _stop(self) -> None:
        for check in self._checks:
            check.cancel()
        for server in self._servers.values():
            server.close()
        await self._changing.acquire()  # never released, so that no HAProxy starts any more
        self._current = None
        for process in self._processes:
            process.kill()
        await asyncio.gather(*self._processes.values())

    async def _listen(self, path: Path, handle: ConnectionHandler) -> None:
        if path not in self._servers:
            self._servers[path] = await asyncio.start_unix_server(handle, path)
            path.chmod(0o600)

    async def _attach(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Apply a configuration from Ray Serve, or send back why it cannot be applied.

        Stay connected until the attached process ends or a later process attaches.
        """
        self._connections += 1
        attached = _Attached(self._connections, _read_peer_pid(writer), writer)
        with contextlib.suppress(ConnectionError):
            try:
                config = Path((await reader.readline()).decode().strip())
                text = config.read_text(encoding="utf-8")
                admin_socket = find_admin_socket(text)
                async with self._changing:
                    # Ray Serve may give a process up, and start the next one, while HAProxy still
                    # starts with the configuration of the former.
                    if attached.number > self._newest:
                        await self._apply(text)
                        await self._listen(admin_socket, self._relay)
                        self._set_attached(attached)
            except (ServeError, OSError, ValueError) as error:  # ValueError: not UTF-8, or too long
                self._report(f"HAProxy keeps its configuration: {error}")
                writer.write(str(error).encode())
            else:
                if attached is self._attached:
                    await reader.read()  # returns when the attached process ends
                    self._detach(attached, admin_socket)
        writer.close()

    def _set_attached(self, attached: _Attached) -> None:
        previous, self._attached = self._attached, attached
        self._newest = attached.number
        if previous is not None:
            previous.writer.close()

    def _detach(self, attached: _Attached, admin_socket: Path) -> None:
        """Close the admin socket if no later process has attached.

        Ray Serve then notices that the attached process has ended.
        """
        if self._attached is attached:
            self._attached = None
            self._servers.pop(admin_socket).close()
            admin_socket.unlink(missing_ok=True)

    async def _apply(self, text: str) -> None:
        """Start HAProxy with a new configuration. The caller holds `_changing`."""
        if has_routes(text) and text != self._routes:
            await self._replace(
                lambda paths: (
                    edit_for_host(text, paths, self._limits, self._metrics_host)
                    + self._build_grpc(paths, text)
                ),
                self._pem,
            )
            self._routes = text

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one admin command to HAProxy. Replace the pid in the answer by the attached pid.

        Ray Serve waits until the process that it has started, the attached one, answers.
        """
        with contextlib.suppress(OSError):
            line = await reader.readline()
            attached = self._attached  # copied, because it may change while HAProxy answers
            if attached is not None and self._current is not None:
                answer = await self._current.command(line)
                pid = b"\nPid: %d\n" % attached.pid
                writer.write(re.sub(rb"\nPid: \d+\n", pid, answer))
                await writer.drain()
        writer.close()

    async def _replace(self, build: BuildConfig, pem: bytes) -> None:
        """Start HAProxy with a new configuration and certificate.

        The previous process finishes its requests; if no other one starts, it goes on serving. The
        caller holds `_changing`.
        """
        self._generation += 1
        paths = EdgePaths(
            listener_fd=self._listener.fileno(),
            admin_socket=self.directory / f"admin-{self._generation}.sock",
            errors=self._errors,
            certificate=self.directory / f"certificate-{self._generation}.pem" if pem else None,
        )
        files = HaproxyFiles(
            binary=self._haproxy,
            config=self.directory / f"haproxy-{self._generation}.cfg",
            text=build(paths),
            admin_socket=paths.admin_socket,
            log=self.directory / "haproxy.log",
            certificate=paths.certificate,
            pem=pem,
        )
        previous = self._current
        try:
            await self._run(files)
        except BaseException:
            files.remove()
            raise
        self._build, self._pem = build, pem
        if previous is not None:
            previous.drain()
            previous.files.remove()

    async def _run(self, files: HaproxyFiles) -> None:
        # Write all files before every start, because a cleaner of /tmp may have removed them.
        write_errors(self.directory)
        listeners = [self._listener.fileno()]
        if self._grpc is not None:
            self._grpc.write_errors()
            listeners.append(self._grpc.listener_fd)
        files.write()
        process = await HaproxyProcess.start(files, listeners)
        self._current = process
        self._processes[process] = asyncio.create_task(self._watch(process))

    async def _watch(self, process: HaproxyProcess) -> None:
        """Restart HAProxy with the same files if `process` ends while it is the current process."""
        code = await process.wait()
        del self._processes[process]
        if process is not self._current:
            return
        self._report(f"HAProxy ended with exit code {code}; it is started again")
        while process is self._current:
            try:
                async with self._changing:
                    if process is self._current:
                        await self._run(process.files)
            except (EdgeError, OSError) as error:
                self._report(f"HAProxy does not start: {error}")
                await asyncio.sleep(RETRY_S)

    async def _check_health(self) -> None:
        """Kill HAProxy if it hangs or is stopped, so that `_watch` restarts it."""
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            process = self._current
            if process not in self._processes:
                continue
            cpu_s = process.read_cpu_s()
            if await self._answers_a_probe(process) or process is not self._current:
                continue
            # A process that still uses CPU time does not hang: it waits for a core or serves many
            # requests. Killing it would lose the requests in flight. HAProxy's own watchdog handles
            # endless loops.
            if process.read_cpu_s() == cpu_s:
                self._report("HAProxy does not answer")
                process.kill()

    async def _follow_renewals(self, certificate: CertificateFiles) -> None:
        """Start HAProxy with the new certificate when the operator has renewed the files."""
        problem = ""
        while True:
            await asyncio.sleep(RENEWAL_S)
            try:
                pem = await asyncio.to_thread(certificate.read)
                if pem != self._pem:
                    await asyncio.to_thread(certificate.check, pem)
                    async with self._changing:
                        await self._save_server_state()
                        await self._replace(self._build, pem)
                    self._report("HAProxy serves with the new certificate")
                problem = ""
            except (ServeError, OSError) as error:
                reason = re.sub(r"\d+", "", str(error))  # HAProxy's messages have its process id
                if reason != problem:  # a renewal may replace one file after the other
                    problem = reason
                    self._report(f"HAProxy keeps its certificate: {error}")

    async def _save_server_state(self) -> None:
        """Write which replicas HAProxy can reach, for its next process to start with.

        Ray Serve writes this file only when routes change, so it may be weeks old.
        """
        path = find_state_file(self._routes)
        if path is not None and self._current is not None:
            path.write_bytes(await self._current.command(b"show servers state\n"))

    async def _answers_a_probe(self, process: HaproxyProcess) -> bool:
        """Probe twice, because a busy host may have delayed the first answer."""
        return await process.is_serving(HEALTH_TIMEOUT_S) or await process.is_serving(
            HEALTH_TIMEOUT_S
        )


def control_socket(directory: Path) -> Path:
    """Return the path of the socket on which `attach.py` connects to the edge."""
    return directory / "edge.sock"


def _read_peer_pid(writer: asyncio.StreamWriter) -> int:
    peer: socket.socket = writer.get_extra_info("socket")
    size = PEER_CREDENTIALS.size
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid: int = PEER_CREDENTIALS.unpack(credentials)[0]
    return pid
