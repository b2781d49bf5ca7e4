"""Addresses and messages of `hundredfold serve`, without a cluster."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cluster.edge.certificate import CertificateFiles
from cluster.edge.haproxy_config import ClientLimits
from cluster.edge.haproxy_process import EdgeError
from cluster.edge.supervisor import Edge, EdgeSettings
from cluster.environment import RAY_ENVIRONMENT
from cluster.launcher.command import add_arguments, run
from cluster.launcher.launched_config import LaunchedConfig, ServeOptions
from cluster.launcher.local_ports import LocalPorts
from cluster.launcher.ray_host import build_ray_command
from cluster.launcher.server import (
    build_environment,
    lock_run_directory,
    run_edge,
    serve_at_edge,
    serve_until_stopped,
)
from cluster.launcher.stop_signals import StopSignal, list_stop_signals, stop_signals_raise
from cluster.progress import StartupProgress
from cluster.start_errors import StartError, UnusableConfig
from tests.support.ports import free_port


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HUNDREDFOLD_KEYS", raising=False)


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("--num-gpus", "-1", "must be at least 0"),
        ("--connections-per-client", "0", "must be at least 1"),
        ("--max-requests", "0", "must be at least 1"),
        ("--start-timeout-s", "-5", "must be more than 0 seconds"),
        ("--stop-timeout-s", "0", "must be more than 0 seconds"),
    ],
)
def test_numbers_out_of_range_are_refused(
    option: str, value: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([option, value])
    assert f"argument {option}: {limit}" in capsys.readouterr().err


class FakeEdge:
    """An edge that starts no HAProxy and records its settings."""

    settings: EdgeSettings
    grpc_address: tuple[str, int] | None

    def create(
        self,
        _directory: Path,
        _listener: socket.socket,
        _haproxy: str,
        _report: Callable[[str], None],
        settings: EdgeSettings,
        grpc_listener: socket.socket | None,
    ) -> FakeEdge:
        self.settings = settings
        self.grpc_address = None if grpc_listener is None else grpc_listener.getsockname()
        return self

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


@pytest.fixture
def restored_hangup() -> Iterator[None]:
    previous = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.usefixtures("restored_hangup")
def test_closed_terminal_stops_the_server() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert signal.SIGHUP in list_stop_signals()
    with pytest.raises(StopSignal), stop_signals_raise():
        os.kill(os.getpid(), signal.SIGHUP)


@pytest.mark.usefixtures("restored_hangup")
def test_closed_terminal_does_not_stop_a_server_under_nohup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    passed_on: list[list[signal.Signals]] = []
    monkeypatch.setattr("cluster.launcher.command.leads_own_session", lambda: False)
    monkeypatch.setattr("cluster.launcher.command.run_in_new_session", passed_on.append)
    run(argparse.Namespace())
    assert passed_on == [[signal.SIGINT, signal.SIGTERM]]
    with stop_signals_raise():
        os.kill(os.getpid(), signal.SIGHUP)
    with pytest.raises(StopSignal), stop_signals_raise():
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("blocked", [".run", ".run/lock"])
def test_run_directory_that_cannot_be_written_is_named(tmp_path: Path, blocked: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("applications: [{name: a, route_prefix: /, import_path: 'shop:app'}]\n")
    run_dir, other = tmp_path / ".run", tmp_path / blocked
    if other == run_dir:
        run_dir.touch()
    else:
        other.mkdir(parents=True)
    with pytest.raises(StartError, match=f"cannot write to `{run_dir}`: ") as refused:
        serve_until_stopped(ServeOptions(config=file, run_dir=run_dir))
    assert "in a directory that you may write to" in refused.value.hint


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Let every write to a file fail. Python ignores the signal that comes with it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("full_disk")
def test_full_disk_is_named(tmp_path: Path) -> None:
    lock = lock_run_directory(tmp_path)
    with pytest.raises(StartError, match=f"cannot use `{tmp_path}`: File too large") as refused:
        lock.__enter__()
    assert "free space" in refused.value.hint


@pytest.mark.usefixtures("full_disk")
def test_full_disk_of_the_edge_is_named(tmp_path: Path) -> None:
    settings = ServeOptions(config=tmp_path, run_dir=tmp_path)
    edge = run_edge(settings, ("127.0.0.1", free_port()), StartupProgress())
    with pytest.raises(StartError, match=r"cannot use `/.*/hundredfold-.*: File too large"):
        edge.__enter__()


@pytest.mark.parametrize(
    ("text", "code"),
    [("applications: [\n", 78), ("unknown: 1\napplications: []\n", 78), (None, 78), ("dir", 1)],
    ids=repr,
)
def test_unusable_config_has_an_exit_code_of_its_own(
    text: str | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After exit code 78, the systemd unit does not start the server again.

    A file that cannot be read has another code, because its disk may recover.
    """
    monkeypatch.setattr("cluster.launcher.command.leads_own_session", lambda: True)
    file = tmp_path / "config.yaml"
    if text == "dir":
        file.mkdir()
    elif text is not None:
        file.write_text(text)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args([str(file)])) == code


def test_other_failed_start_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.launcher.command.leads_own_session", lambda: True)
    file = tmp_path / "config.yaml"
    file.write_text("applications: [{name: a, route_prefix: /, import_path: 'shop:app'}]\n")
    (tmp_path / ".run").touch()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args([str(file)])) == 1


@pytest.mark.parametrize(("options", "visible"), [(["--no-gpu"], ""), ([], "0,1")])
def test_no_gpu_hides_the_gpus_from_every_process(
    options: list[str], visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, an actor to which Ray assigns no GPU still sees all GPUs of the host."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    num_gpus = parser.parse_args(options).num_gpus
    settings = ServeOptions(config=tmp_path, run_dir=tmp_path, num_gpus=num_gpus)
    environment = build_environment(settings, LocalPorts(*range(8)), tmp_path)
    assert environment["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize("module", ["cluster", "yaml"])
def test_children_import_nothing_from_the_working_directory(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("raise SystemExit('imported')\n")
    environment = build_environment(
        ServeOptions(config=tmp_path, run_dir=tmp_path), LocalPorts(*range(8)), tmp_path
    )
    command = [*build_ray_command(LocalPorts(*range(8)), 0)[:3], "--version"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_relative_paths_of_ray_hold_in_every_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "token")
    environment = build_environment(
        ServeOptions(config=tmp_path, run_dir=tmp_path), LocalPorts(*range(8)), tmp_path
    )
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")


def test_limits_of_logs_are_those_of_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, ports = ServeOptions(config=tmp_path, run_dir=tmp_path), LocalPorts(*range(8))
    monkeypatch.setenv("RAY_ROTATION_MAX_BYTES", "1000")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # no operator may change this one
    environment = build_environment(settings, ports, tmp_path)
    assert environment["RAY_ROTATION_MAX_BYTES"] == "1000"
    assert environment["RAY_ROTATION_BACKUP_COUNT"] == RAY_ENVIRONMENT["RAY_ROTATION_BACKUP_COUNT"]
    assert environment["RAY_AUTH_MODE"] == "token"


def test_low_limit_of_open_files_is_named_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingEdge(FakeEdge):
        def start(self) -> None:
            raise EdgeError("Cannot raise FD limit to 8217, limit is 1024.")

    monkeypatch.setattr("cluster.launcher.server.Edge", FailingEdge().create)
    monkeypatch.setattr("cluster.launcher.server.find_haproxy", lambda: "haproxy")
    settings = ServeOptions(config=tmp_path, run_dir=tmp_path)
    for limit, remedy in ((1024, "ulimit -Hn"), (65_536, "")):
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, limit=limit: (limit, limit))
        edge = run_edge(settings, ("127.0.0.1", free_port()), StartupProgress())
        with pytest.raises(StartError, match="Cannot raise FD limit") as raised:
            edge.__enter__()
        assert remedy in raised.value.hint
        assert bool(raised.value.hint) is bool(remedy)


def test_links_of_the_command_line_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to a key file that gets another target revokes keys."""
    release = tmp_path / "release"
    release.mkdir()
    for name in ("config.yaml", "keys.json"):
        (release / name).touch()
        (tmp_path / name).symlink_to(release / name)
    given: list[ServeOptions] = []
    monkeypatch.setattr("cluster.launcher.command.leads_own_session", lambda: True)
    monkeypatch.setattr(
        "cluster.launcher.command.serve_until_stopped", lambda settings: given.append(settings)
    )
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    run(parser.parse_args(["config.yaml", "--keys", "keys.json"]))
    assert given[0].key_file == tmp_path / "keys.json"
    assert given[0].run_dir == tmp_path / ".run", "two servers may share the target of their links"


def test_options_of_the_command_line_reach_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("applications: []\n")
    given: list[ServeOptions] = []
    monkeypatch.setattr("cluster.launcher.command.leads_own_session", lambda: True)
    monkeypatch.setattr(
        "cluster.launcher.command.serve_until_stopped", lambda settings: given.append(settings)
    )
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = ["--connections-per-client", "7", "--max-requests", "9", "--stop-timeout-s", "130"]
    options += ["--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem", "--metrics-host", "0.0.0.0"]
    grpc_port = free_port()
    options += ["--grpc-port", str(grpc_port)]
    run(parser.parse_args([str(config), *options]))
    assert given[0].stop_timeout_s == 130
    edge = FakeEdge()
    monkeypatch.setattr("cluster.launcher.server.Edge", edge.create)
    monkeypatch.setattr("cluster.launcher.server.find_haproxy", lambda: "haproxy")
    address = ("127.0.0.1", free_port())
    with run_edge(given[0], address, StartupProgress()):
        assert edge.settings == EdgeSettings(
            ClientLimits(connections=7, requests=9),
            "0.0.0.0",
            CertificateFiles(Path("c.pem"), Path("k.pem")),
        )
        assert edge.grpc_address == ("127.0.0.1", grpc_port)
    with run_edge(replace(given[0], grpc_port=None), address, StartupProgress()):
        assert edge.grpc_address is None


def test_running_requests_have_the_time_of_the_option_after_a_stop_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[float] = []

    class FakeChildren:
        def __init__(self, run_dir: Path) -> None: ...

        def stop(self, serve_stop_s: float, _is_urgent: Callable[[], bool]) -> list[str]:
            stopped.append(serve_stop_s)
            return []

    class FakeHost:
        def __init__(self, *, children: FakeChildren, **_: object) -> None:
            self.children = children

        def start(self) -> None:
            raise StopSignal

    monkeypatch.setattr("cluster.launcher.server.ChildProcesses", FakeChildren)
    monkeypatch.setattr("cluster.launcher.server.RayHost", FakeHost)
    settings = ServeOptions(config=tmp_path, run_dir=tmp_path, num_gpus=0, stop_timeout_s=130)
    served, ports = LaunchedConfig(settings), LocalPorts(*range(8))
    edge = cast(Edge, SimpleNamespace(directory=tmp_path))
    with stop_signals_raise():  # restores the signals, which the end of the server ignores
        assert serve_at_edge(edge, ports, served, settings, StartupProgress()) == 0
    assert stopped == [130]


def test_unusable_certificate_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.launcher.server.find_haproxy", lambda: "haproxy")
    certificate = CertificateFiles(tmp_path / "missing.pem")
    settings = ServeOptions(config=tmp_path, run_dir=tmp_path, certificate=certificate)
    edge = run_edge(settings, ("127.0.0.1", free_port()), StartupProgress())
    with pytest.raises(StartError, match=r"missing\.pem`: No such file") as raised:
        edge.__enter__()
    assert not isinstance(raised.value, UnusableConfig), "a later start may find a renewed file"


@pytest.mark.parametrize("option", ["--port", "--grpc-port", "--metrics-port"])
@pytest.mark.parametrize("value", ["0", "65536", "-1", "http", "²"])
def test_wrong_port_is_a_wrong_option(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service manager does not start again after exit code 2."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit) as exited:
        parser.parse_args([f"{option}={value}"])
    assert exited.value.code == 2
    assert f"`{value}` is not a port" in capsys.readouterr().err


def test_key_of_no_certificate_is_refused() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "hundredfold", "serve", "--ssl-keyfile", "k.pem"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "--ssl-keyfile needs --ssl-certfile" in result.stderr
