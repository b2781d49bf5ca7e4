"""One box: start Ray with the right environment, run the config, clean up on every way out.

    launcher (this) ── ray start --head --block ── everything Ray starts
             └──────── serve run <config>

Both children lead sessions of their own, so that Ctrl-C reaches the launcher only and it can stop
them in order. The kernel tells them (setpriv --pdeathsig) when the launcher is killed. Whatever
is left of their sessions is swept, at the end or by the next start.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from cluster.local import LocalPorts, local_environment
from cluster.processes import (
    ChildProcesses,
    kill_previous_run,
    port_is_free,
    port_owner,
)
from cluster.progress import Progress, StartError, not_ready, port_closed

RUN_DIR = ".run"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OBJECT_STORE_BYTES = 256 << 20  # messages travel by gRPC; the object store holds next to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What the command line says."""

    config: Path
    host: str | None = None  # None: as the config says
    port: int | None = None
    num_gpus: int | None = None  # None: what Ray finds
    start_timeout_s: float = 180.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hundredfold serve`."""
    parser.add_argument("config", nargs="?", type=Path, default=Path("serve_config.yaml"))
    parser.add_argument("--host", help="address to listen on (default: as in the config)")
    parser.add_argument("--port", type=int, help="port to listen on (default: as in the config)")
    parser.add_argument("--num-gpus", type=int, help="GPUs to tell Ray of (default: those found)")
    parser.add_argument("--start-timeout-s", type=float, default=180.0)


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; 0 after a stop that was asked for."""
    settings = UpSettings(
        config=arguments.config,
        host=arguments.host,
        port=arguments.port,
        num_gpus=arguments.num_gpus,
        start_timeout_s=arguments.start_timeout_s,
    )
    try:
        with stop_signals_raise():
            return serve_until_stopped(settings)
    except StopSignal:
        return 0
    except StartError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {error.hint}", file=sys.stderr)
        return 1


class StopSignal(BaseException):
    """A signal asked us to stop. Not an Exception: nothing on the way may swallow it."""


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal all raise Stopped, once."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        ignore_stop_signals()
        raise StopSignal

    former = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """From here on: the way out must not be interrupted half-way."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def serve_until_stopped(settings: UpSettings) -> int:
    """The whole life of a run."""
    progress = Progress()
    run_dir = settings.config.resolve().parent / RUN_DIR
    progress.say(f"checking {settings.config.name}")
    refuse_problems(settings.config)
    run_dir.mkdir(exist_ok=True)
    with lock_run_directory(run_dir):
        if killed := kill_previous_run(run_dir):
            progress.say(f"ended {killed} processes a former run had left")
        config = effective_config(settings)
        host, port = config["http_options"]["host"], config["http_options"]["port"]
        check_port(host, port)
        children = ChildProcesses(run_dir)
        try:
            start(children, config, settings, progress)
            url = f"http://{reachable(host)}:{port}"
            progress.wait(not_ready(url), children.failure, settings.start_timeout_s)
            check_environment_took_effect(children)
            progress.say(startup_message(url, config))
            children.wait()
            raise StartError(children.failure() or "a child ended", hint=f"see {run_dir}")
        except StopSignal:
            progress.say("stopping")
            return 0
        finally:
            ignore_stop_signals()
            left = children.stop()
            progress.say("stopped; nothing is left running" if not left else f"left: {left}")


@contextmanager
def lock_run_directory(run_dir: Path) -> Iterator[None]:
    """Hold the run directory's lock; the kernel drops it however this process ends."""
    with (run_dir / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            lock.seek(0)
            raise StartError(
                f"this checkout is already being served by pid {lock.read().strip()}",
                hint="stop it with Ctrl-C there, or serve from another checkout with PORT=...",
            ) from exc
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def effective_config(settings: UpSettings) -> dict[str, Any]:
    """The config with host and port from the command line."""
    config: dict[str, Any] = yaml.safe_load(settings.config.read_text(encoding="utf-8"))
    http = config.setdefault("http_options", {})
    http["host"] = settings.host or http.get("host", "127.0.0.1")
    http["port"] = settings.port or http.get("port", 8000)
    return config


def refuse_problems(config: Path) -> None:
    """Lint before anything is started, because Serve ignores what it does not know."""
    from cluster.check import check_file, report  # imports Ray, which takes a second

    try:
        problems = check_file(config)
    except (OSError, UnicodeDecodeError) as exc:
        raise StartError(f"cannot read `{config}`: {exc}") from exc
    if problems:
        raise StartError(f"`{config}` has problems\n{report(config.name, problems)}")


def check_environment_took_effect(children: ChildProcesses) -> None:
    """Serve falls back to its slow Python proxy without a word; HAProxy shows it did not."""
    if "haproxy" not in children.names():
        raise StartError(
            "Serve runs without HAProxy although it was switched on",
            hint=f"see {children.run_dir}/serve.log",
        )


def check_port(host: str, port: int) -> None:
    """Refuse a port that is taken, before anything is started."""
    try:
        free = port_is_free(host, port)
    except OSError as exc:
        raise StartError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    if not free:
        raise StartError(
            f"port {port} on {host} is taken by {port_owner(port)}",
            hint=f"stop it, or move: make serve PORT={port + 1}",
        )


def reachable(host: str) -> str:
    """An address a client on this box can use."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def start(
    children: ChildProcesses, config: dict[str, Any], settings: UpSettings, progress: Progress
) -> None:
    """Bring up Ray, then hand it the config."""
    ports = LocalPorts.choose(reserved=config["http_options"]["port"])
    environment = os.environ | local_environment(ports)
    ensure_token(environment)
    effective = children.run_dir / "serve_config.yaml"
    effective.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")

    progress.say(f"starting Ray (dashboard on 127.0.0.1:{ports.dashboard})")
    children.start("ray", ray_command(ports, settings.num_gpus), environment)
    address = f"127.0.0.1:{ports.gcs}"
    up = port_closed("127.0.0.1", ports.dashboard)
    progress.wait(up, children.failure, settings.start_timeout_s)
    progress.say(f"serve run {settings.config.name}")
    environment["RAY_ADDRESS"] = address
    children.start("serve", [bin_path("serve"), "run", str(effective)], environment)


def ray_command(ports: LocalPorts, num_gpus: int | None) -> list[str]:
    """`ray start` on loopback with every port named, so that two clusters fit on one box."""
    # At least two logical CPUs, or the deployments' shares do not fit on a one-core machine.
    num_cpus = max(2, len(os.sched_getaffinity(0)))
    command = [
        bin_path("ray"),
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        "--node-ip-address=127.0.0.1",
        "--dashboard-host=127.0.0.1",
        f"--port={ports.gcs}",
        f"--dashboard-port={ports.dashboard}",
        f"--ray-client-server-port={ports.client}",
        f"--dashboard-agent-listen-port={ports.agent}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--num-cpus={num_cpus}",
    ]
    return command if num_gpus is None else [*command, f"--num-gpus={num_gpus}"]


def bin_path(name: str) -> str:
    """A console script of this Python's environment."""
    return str(Path(sys.executable).with_name(name))


def ensure_token(environment: dict[str, str]) -> None:
    """Ray's token guards its control ports; the first run on a machine makes one."""
    if (Path.home() / ".ray" / "auth_token").exists() or "RAY_AUTH_TOKEN" in environment:
        return
    command = [bin_path("ray"), "get-auth-token", "--generate"]
    subprocess.run(command, env=environment, check=True, capture_output=True)


def startup_message(url: str, config: dict[str, Any]) -> str:
    """The last line: where it is, and one thing to try."""
    model = config["applications"][0]["args"]["models"][0]["id"]
    return f'serving on {url} - try: curl {url}/models/{model} -d \'{{"inputs": "Hello world"}}\''
