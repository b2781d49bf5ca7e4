"""Restarts of Ray and Serve, with children that only record their starts."""

from __future__ import annotations

import errno
import json
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from cluster.launcher.local_ports import LocalPorts
from cluster.launcher.ray_host import RayHost, ensure_token
from cluster.launcher.ray_sessions import KEPT_SESSIONS, list_sessions
from cluster.launcher.serve_status import REQUIRED, DeployFailures
from cluster.progress import StartupProgress
from cluster.start_errors import StartError
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.ingress.devices.cluster_state import ClusterMonitor, ClusterSnapshot
from tests.support.waiting import TIMEOUT_S

NOWHERE = "http://127.0.0.1:9"  # nothing serves the discard port


class RecordedChildren:
    """Children that run until `end` or `kill`. `events` lists what happened to them."""

    PID = 4711

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.events: list[str] = []
        self.directories: dict[str, Path | None] = {}
        self._running = {"ray", "serve"}
        self._ended: dict[str, int] = {}

    def start(
        self,
        name: str,
        _command: list[str],
        _environment: dict[str, str],
        directory: Path | None = None,
    ) -> int:
        self.directories[name] = directory
        self.events.append(f"start {name}" if name not in self._running else f"second {name}")
        self._running.add(name)
        self._ended.pop(name, None)
        return self.PID

    def end(self, name: str) -> None:
        self._running.remove(name)
        self._ended[name] = 1

    def kill(self) -> None:
        self.events.append("kill")
        self._running.clear()
        self._ended.clear()

    def find_ended(self) -> dict[str, int]:
        return self._ended

    def failure(self) -> str | None:
        return f"{list(self._ended)} ended" if self._ended else None


@pytest.fixture
def open_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def children(tmp_path: Path) -> RecordedChildren:
    return RecordedChildren(tmp_path)


@pytest.fixture
def host(children: RecordedChildren, open_port: int, tmp_path: Path) -> RayHost:
    """A host whose Ray accepts connections, and whose Serve never becomes ready."""
    return RayHost(
        children=children,
        read_config=dict,
        find_url=lambda: NOWHERE,
        ports=LocalPorts(*[open_port] * 8),
        metrics_address="127.0.0.1:9101",
        environment={"RAY_AUTH_TOKEN": "secret", "RAY_TMPDIR": str(tmp_path / "tmp")},
        serve_directory=tmp_path / "private",
        num_gpus=0,
        start_timeout_s=0,
        progress=StartupProgress(),
    )


def test_serve_that_does_not_become_ready_is_replaced_with_ray(
    host: RayHost, children: RecordedChildren, capsys: pytest.CaptureFixture[str]
) -> None:
    children.end("serve")
    with pytest.raises(StartError, match="still waiting after 0 s: starting: the ingress"):
        host.restart(SimpleNamespace(is_attached=True))
    both = ["kill", "start ray", "start serve"]
    assert children.events == ["start serve", *both, *both]
    reported = capsys.readouterr().err
    assert "['serve'] ended\nstarting again" in reported
    assert reported.count("still waiting after 0 s: starting: the ingress\nstarting again") == 2


def test_end_of_ray_restarts_both(host: RayHost, children: RecordedChildren) -> None:
    children.end("ray")
    with pytest.raises(StartError):
        host.restart(SimpleNamespace(is_attached=True))
    assert children.events[:3] == ["kill", "start ray", "start serve"]


class PrefixedIngress(BaseHTTPRequestHandler):
    """An ingress that is ready below `/v2`."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v2/ready" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def test_restart_waits_below_the_prefix_of_the_config_that_it_reads(
    host: RayHost, children: RecordedChildren
) -> None:
    urls = [NOWHERE]
    with HTTPServer(("127.0.0.1", 0), PrefixedIngress) as ingress:
        threading.Thread(target=ingress.serve_forever, args=(0.05,), daemon=True).start()

        def read_config() -> dict[str, str]:
            urls.append(f"http://127.0.0.1:{ingress.server_port}/v2")
            return {}

        children.end("ray")
        changed = replace(
            host,
            read_config=read_config,
            find_url=lambda: urls[-1],
            start_timeout_s=TIMEOUT_S,
        )
        changed.restart(SimpleNamespace(is_attached=True))
        ingress.shutdown()
    assert children.events == ["kill", "start ray", "start serve"]


def test_logs_of_the_replicas_are_named_and_linked(
    host: RayHost, children: RecordedChildren, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers of one user share the directory, and `session_latest` is the last started one's."""
    sessions = Path(host.environment["RAY_TMPDIR"]) / "ray"
    (sessions / "session_2026-11-28_10-55-54_740506_7911").mkdir(parents=True)
    for time in ("10-54-05", "10-54-35"):  # a restart of Ray replaces the link
        session = sessions / f"session_2026-11-28_{time}_241062_{RecordedChildren.PID}"
        session.mkdir()
        host.start()
        assert (children.run_dir / "ray").readlink() == session
        assert f"logs of the replicas: {session}/logs/serve\n" in capsys.readouterr().err


def test_each_start_removes_ended_sessions_of_a_directory_for_logs(host: RayHost) -> None:
    directory = Path(host.environment["RAY_TMPDIR"])
    ended = 2**31 - 1  # above the largest process id of Linux
    for second in range(KEPT_SESSIONS + 2):
        (directory / "ray" / f"session_2026-11-28_10-54-0{second}_241062_{ended}").mkdir(
            parents=True
        )
    host.start()
    assert len(list_sessions(directory)) == KEPT_SESSIONS + 2, "others may use a named directory"
    environment = host.environment | {"LOGS_DIRECTORY": str(directory)}
    replace(host, environment=environment).start()
    assert len(list_sessions(directory)) == KEPT_SESSIONS


class FailedDashboard(BaseHTTPRequestHandler):
    """Ray's dashboard, with deployments that failed to start."""

    failed: ClassVar[Sequence[str]] = ("CpuEncoder", "GpuEncoder")

    def do_GET(self) -> None:
        known = self.headers["authorization"] == "Bearer secret"
        message = (
            "The deployment failed to start.\nTraceback:\n  f()\nUnknownModel: no version 01\n"
        )
        deployments = {"Ingress": {"status": "UPDATING", "message": ""}}
        for name in self.failed:
            deployments[name] = {"status": "DEPLOY_FAILED", "message": message}
        app = {"status": "DEPLOY_FAILED", "message": "Failed.", "deployments": deployments}
        body = json.dumps({"applications": {"hundredfold": app}}).encode()
        self.send_response(200 if known else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def test_deployment_that_cannot_start_ends_the_start_with_its_reason(
    host: RayHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.launcher.serve_status.ASK_AFTER_S", 0)
    with HTTPServer(("127.0.0.1", 0), FailedDashboard) as dashboard:
        threading.Thread(target=dashboard.serve_forever, args=(0.05,), daemon=True).start()
        ports = replace(host.ports, dashboard=dashboard.server_port)
        started = replace(host, ports=ports, start_timeout_s=60)
        with pytest.raises(StartError) as raised:
            started.wait_until_ready(SimpleNamespace(is_attached=True))
        dashboard.shutdown()
    assert raised.value.message == (
        "Ray Serve cannot start the server\nCpuEncoder: UnknownModel: no version 01"
    )


def test_failed_gpu_deployment_does_not_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.launcher.serve_status.ASK_AFTER_S", 0)
    monkeypatch.setattr(FailedDashboard, "failed", ["GpuEncoder"])
    with HTTPServer(("127.0.0.1", 0), FailedDashboard) as dashboard:
        threading.Thread(target=dashboard.serve_forever, args=(0.05,), daemon=True).start()
        failures = DeployFailures(dashboard.server_port, {"RAY_AUTH_TOKEN": "secret"})
        assert failures.find() is None
        dashboard.shutdown()


def test_modules_of_the_working_directory_are_not_on_the_import_path_of_replicas(
    host: RayHost, children: RecordedChildren
) -> None:
    """Ray adds the working directory of `serve run` to it."""
    host.start()
    assert children.directories == {"ray": None, "serve": host.serve_directory}


def test_full_disk_of_ray_is_named_before_a_child_starts(
    host: RayHost, children: RecordedChildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(f_bavail=0, f_bfree=0, f_frsize=4096)
    monkeypatch.setattr("os.statvfs", lambda _path: full)
    with pytest.raises(StartError, match=r"`.*/tmp` has 0\.0 MB of free space"):
        host.start()
    assert children.events == []


def test_served_config_is_private(host: RayHost, children: RecordedChildren) -> None:
    """It may contain secrets, as environment variables of replicas."""
    config = children.run_dir / "serve_config.yaml"
    host.start()
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    config.chmod(0o644)
    host.start()
    assert stat.S_IMODE(config.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        (0o644, errno.EPERM),  # as on Windows' disks in WSL and some network file systems
        (0o600, errno.ENOSPC),  # a private config needs no change of its mode
    ],
)
def test_file_system_may_refuse_the_mode_of_the_served_config(
    host: RayHost,
    children: RecordedChildren,
    monkeypatch: pytest.MonkeyPatch,
    mode: int,
    number: int,
) -> None:
    config = children.run_dir / "serve_config.yaml"
    config.write_text("{}\n")
    config.chmod(mode)

    def refuse(path: Path, _mode: int) -> None:
        raise OSError(number, "refused", str(path))

    monkeypatch.setattr(Path, "chmod", refuse)
    host.start()
    assert "second serve" in children.events


def test_unchanged_config_is_not_written_again(host: RayHost, children: RecordedChildren) -> None:
    """A restart must succeed on a full disk."""
    config = children.run_dir / "serve_config.yaml"
    config.write_text("{}\n")
    children.run_dir.chmod(0o500)
    before = config.stat().st_mtime_ns
    host.start()
    assert config.stat().st_mtime_ns == before


def test_config_that_cannot_be_written_is_a_failed_attempt(
    host: RayHost, children: RecordedChildren, capsys: pytest.CaptureFixture[str]
) -> None:
    config = children.run_dir / "serve_config.yaml"
    config.mkdir()  # cannot be replaced by a file
    children.end("serve")
    with pytest.raises(StartError, match=f"cannot use `{config}`: Is a directory"):
        host.restart(SimpleNamespace(is_attached=True))
    assert capsys.readouterr().err.count("starting again") == 3


def test_named_token_keeps_its_mode_and_must_be_readable(tmp_path: Path) -> None:
    token = tmp_path / "token"
    environment = {"RAY_AUTH_TOKEN_PATH": str(token)}
    with pytest.raises(StartError, match="which cannot be read"):
        ensure_token(environment)
    token.write_text("secret")
    token.chmod(0o440)
    ensure_token(environment)
    assert token.stat().st_mode & 0o777 == 0o440


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The token file of a home directory. A script stands in for Ray's command that writes it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    command = tmp_path / "ray"
    command.write_text('#!/bin/sh\nprintf new > "$HOME/.ray/auth_token"\n')
    command.chmod(0o700)
    monkeypatch.setattr("cluster.launcher.ray_host.bin_path", lambda _name: str(command))
    (tmp_path / ".ray").mkdir()
    return tmp_path / ".ray" / "auth_token"


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_missing_or_empty_token_is_created(
    token: Path, tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        token.write_text(content)
    ensure_token({"HOME": str(tmp_path)})
    assert token.read_text() == "new"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_private_token_may_be_on_a_read_only_file_system(
    token: Path, tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    token.write_text("old")
    token.chmod(mode)

    def refuse(path: Path, _mode: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "chmod", refuse)
    ensure_token({"HOME": str(tmp_path)})
    assert token.read_text() == "old"


def test_home_without_rights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "file"
    home.touch()
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(StartError, match="cannot create or read the token") as raised:
        ensure_token({"HOME": str(home), "PATH": "/usr/bin"})
    assert "$HOME" in raised.value.hint


def test_start_ends_for_failures_of_the_deployments_that_a_ready_server_needs() -> None:
    devices = {Device.CPU: EncoderSettings()}
    monitor = ClusterMonitor(devices, ClusterSnapshot, devices)
    monitor.apply(ClusterSnapshot(running=dict.fromkeys(REQUIRED, 1)))
    assert monitor.missing() == []
    for name in REQUIRED - {"Ingress"}:
        monitor.apply(ClusterSnapshot(running=dict.fromkeys(REQUIRED - {name}, 1)))
        assert monitor.missing()
