"""`hundredfold serve` on a single host: start Ray and Serve, keep them running, clean up on exit.

    launcher (this) ── ray start --head --block ── all processes of Ray
             ├──────── serve run <config>
             └──────── HAProxy (cluster/edge)

A child that ends is restarted (cluster/launcher/ray_host.py). All processes are in one session,
which the launcher leads. In a terminal the launcher is therefore the child of a process that passes
signals on (cluster/launcher/new_session.py). Ctrl-C reaches only the launcher, which stops its
children in order. If the launcher is killed, the kernel signals the children (setpriv --pdeathsig).
The launcher kills remaining processes of the session when it ends, or at its next start.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from cluster.access import key_file_environment
from cluster.default_config import CONFIG_HELP, find_config
from cluster.diagnosis import MIN_OPEN_FILES, RAISE_OPEN_FILES
from cluster.edge.certificate import CertificateFiles, UnusableCertificate
from cluster.edge.haproxy_config import METRICS_HOST, ClientLimits
from cluster.edge.haproxy_process import EdgeError
from cluster.edge.supervisor import Edge, EdgeSettings
from cluster.gpu_support import gpu_environment, read_gpu_support
from cluster.launcher.launched_config import (
    DEFAULT_LIMITS,
    LaunchedConfig,
    ServeOptions,
    move_behind_edge,
)
from cluster.launcher.local_environment import (
    find_haproxy,
    local_environment,
    ray_temp_environment,
)
from cluster.launcher.local_ports import DEFAULT_PORTS, ClientPorts, LocalPorts, choose_ports
from cluster.launcher.new_session import leads_own_session, run_in_new_session
from cluster.launcher.ray_host import RayHost
from cluster.launcher.startup_messages import startup_messages
from cluster.ports import PORTS, format_address, open_listener
from cluster.processes import ChildProcesses, kill_previous_run, private_directory
from cluster.progress import (
    StartError,
    StartupProgress,
    UnusableConfig,
    file_errors,
    notify_systemd,
)
from deployments.builds.process import HUB_OFFLINE_VARIABLE
from deployments.config import KEY_FILE_VARIABLE
from deployments.terminal.command_line import (
    FAILED,
    UNUSABLE_CONFIG,
    count_from_zero,
    positive_count,
    positive_seconds,
    print_error,
)

RUN_DIR = ".run"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def parse_port(text: str) -> int:
    """Parse the number of a TCP port."""
    if not text.isdecimal() or int(text) not in PORTS:
        raise argparse.ArgumentTypeError(
            f"`{text}` is not a port: use a number from {PORTS[0]} to {PORTS[-1]}"
        )
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", type=Path, help=CONFIG_HELP)
    parser.add_argument("--host", help="address to listen on (default: as in the config)")
    parser.add_argument(
        "--port", type=parse_port, help="port to listen on (default: as in the config)"
    )
    parser.add_argument(
        "--grpc-port",
        type=parse_port,
        metavar="PORT",
        help="port for the Open Inference Protocol over gRPC, on the same address "
        "(default: no gRPC)",
    )
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="require an API key of this file (`hundredfold keys add`; default: as in the config, "
        f"else ${KEY_FILE_VARIABLE})",
    )
    parser.add_argument(
        "--ssl-certfile",
        type=Path,
        metavar="FILE",
        help="speak HTTPS with this certificate and the ones that signed it (PEM); a renewed file "
        "is used within seconds",
    )
    parser.add_argument(
        "--ssl-keyfile",
        type=Path,
        metavar="FILE",
        help="its private key without a password (default: in the file of the certificate)",
    )
    parser.add_argument(
        "--no-auth",
        action="store_true",
        help="let other hosts connect without API keys, for instance behind a gateway",
    )
    parser.add_argument(
        "--metrics-port",
        type=parse_port,
        help=f"port of /metrics (default: {DEFAULT_PORTS['metrics']} or a free one)",
    )
    parser.add_argument(
        "--metrics-host",
        default=METRICS_HOST,
        metavar="ADDRESS",
        help="address of /metrics and /haproxy, for Prometheus on another host "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--connections-per-client",
        type=positive_count,
        default=DEFAULT_LIMITS.connections,
        help="open connections per address (default: %(default)s); more behind a gateway",
    )
    parser.add_argument(
        "--max-requests",
        type=positive_count,
        default=DEFAULT_LIMITS.requests,
        metavar="N",
        help="POST requests in flight per ingress replica, three quarters of them per address "
        "(default: %(default)s); more get 429",
    )
    gpus = parser.add_mutually_exclusive_group()
    gpus.add_argument(
        "--num-gpus",
        type=count_from_zero,
        help="GPUs for Ray (default: those that an engine here can use)",
    )
    gpus.add_argument(
        "--no-gpu", action="store_const", const=0, dest="num_gpus", help="leave GPUs out"
    )
    parser.add_argument(
        "--start-timeout-s",
        type=positive_seconds,
        default=180.0,
        metavar="S",
        help="seconds that each step of a start or restart may take (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a stop signal, and return 0 then.

    Return FAILED if the cluster does not start or restart, UNUSABLE_CONFIG if the config must be
    changed before a start can succeed.
    """
    if not leads_own_session():
        return run_in_new_session(list_stop_signals())
    certificate = None
    if arguments.ssl_certfile is not None:
        certificate = CertificateFiles(arguments.ssl_certfile, arguments.ssl_keyfile)
    elif arguments.ssl_keyfile is not None:
        arguments.command_parser.error("--ssl-keyfile needs --ssl-certfile")
    given: Path | None = arguments.config
    settings = ServeOptions(
        config=find_config(given),
        run_dir=(given.absolute().parent if given else Path.cwd()) / RUN_DIR,
        host=arguments.host,
        port=arguments.port,
        grpc_port=arguments.grpc_port,
        # Keep a symbolic link: replicas follow it when it names another file.
        key_file=arguments.keys and arguments.keys.absolute(),
        certificate=certificate,
        no_auth=arguments.no_auth,
        metrics_host=arguments.metrics_host,
        metrics_port=arguments.metrics_port,
        connections_per_client=arguments.connections_per_client,
        max_requests=arguments.max_requests,
        num_gpus=arguments.num_gpus,
        start_timeout_s=arguments.start_timeout_s,
    )
    try:
        with stop_signals_raise():
            return serve_until_stopped(settings)
    except StopSignal:
        return 0
    except StartError as error:
        code = UNUSABLE_CONFIG if isinstance(error, UnusableConfig) else FAILED
        return print_error(error.message, error.hint, code=code)


class StopSignal(BaseException):
    """A stop signal arrived. Not an Exception, so that `except Exception` does not catch it."""


def list_stop_signals() -> list[signal.Signals]:
    """Return STOP_SIGNALS, without SIGHUP if it is ignored, as after `nohup`."""
    is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [each for each in STOP_SIGNALS if each is not signal.SIGHUP or not is_detached]


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Raise StopSignal once on Ctrl-C, SIGTERM or a closed terminal; see `list_stop_signals`."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        ignore_stop_signals()
        raise StopSignal

    previous = {number: signal.signal(number, stop) for number in list_stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """Ignore further stop signals, which would interrupt the cleanup."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def serve_until_stopped(settings: ServeOptions) -> int:
    progress = StartupProgress()
    run_dir = settings.run_dir
    progress.report(f"checking {settings.config}")
    served = LaunchedConfig(settings)
    http = served.read()["http_options"]
    host, port = http["host"], http["port"]
    with lock_run_directory(run_dir), ExitStack() as claims:
        if killed := kill_previous_run(run_dir):
            progress.report(f"killed {killed} remaining processes of the previous run")
        clients = ClientPorts(port, settings.grpc_port)
        ports = choose_ports(host, clients, settings.metrics_host, settings.metrics_port, claims)
        with run_edge(settings, (host, port), progress) as edge:
            return serve_at_edge(edge, ports, served, settings, progress)


def serve_at_edge(
    edge: Edge,
    ports: LocalPorts,
    served: LaunchedConfig,
    settings: ServeOptions,
    progress: StartupProgress,
) -> int:
    """Start Ray and Serve, and keep them running until a stop signal. Then return 0.

    Raises StartError if a start or restart fails. Always stop all children before the end.
    """
    host = RayHost(
        children=ChildProcesses(settings.run_dir),
        read_config=lambda: move_behind_edge(served.refresh(progress.report)),
        find_url=served.find_url,
        ports=ports,
        metrics_address=format_address(settings.metrics_host, ports.metrics),
        environment=build_environment(settings, ports, edge.directory),
        serve_directory=edge.directory,
        num_gpus=count_gpus(settings.num_gpus, progress),
        start_timeout_s=settings.start_timeout_s,
        progress=progress,
    )
    try:
        host.start()
        host.wait_until_ready(edge)
        for line in startup_messages(served.find_url(), served.last, settings.grpc_port):
            progress.report(line)
        notify_systemd("READY=1")
        while True:
            host.wait()
            host.restart(edge)
    except StopSignal:
        progress.report("stopping")
        return 0
    finally:
        ignore_stop_signals()
        remaining = host.children.stop()
        result = f"still running: {remaining}" if remaining else "all processes have ended"
        progress.report(f"stopped; {result}")


def build_environment(settings: ServeOptions, ports: LocalPorts, edge: Path) -> dict[str, str]:
    """Build the environment of Ray, which has several directories. `edge`: that of the edge."""
    token = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return {
        **os.environ,
        **({"RAY_AUTH_TOKEN_PATH": os.path.abspath(token)} if token else {}),
        **local_environment(ports, edge),
        **ray_temp_environment(os.environ),
        **key_file_environment(settings.key_file),
        **gpu_environment(settings.num_gpus),
        # A file of the working directory may have the name of any module.
        "PYTHONSAFEPATH": "1",
        HUB_OFFLINE_VARIABLE: os.environ.get("HF_HUB_OFFLINE", ""),
    }


def count_gpus(requested: int | None, progress: StartupProgress) -> int:
    """Return `requested`. If it is None, print the GPUs of this host and count the usable ones.

    Also print a line if the packages for CUDA are installed but no GPU is found: after a reboot,
    for example, a host may lack the device files of its GPU.
    """
    if requested is not None:
        return requested
    found = read_gpu_support()
    if found.gpus or found.repair:
        progress.report("; ".join(filter(None, (found.describe(), found.repair))))
    return found.usable


@contextmanager
def run_edge(
    settings: ServeOptions, address: tuple[str, int], progress: StartupProgress
) -> Iterator[Edge]:
    """Run the edge (HAProxy with its supervisor) until the end of the block.

    Raises StartError if HAProxy does not start.
    """
    edge_settings = EdgeSettings(
        ClientLimits(settings.connections_per_client, settings.max_requests),
        settings.metrics_host,
        settings.certificate,
    )
    with ExitStack() as opened:
        directory = opened.enter_context(private_directory(settings.run_dir))
        listener = opened.enter_context(open_listener(*address))
        grpc = None
        if settings.grpc_port is not None:
            grpc = opened.enter_context(open_listener(address[0], settings.grpc_port))
        with file_errors(directory):
            edge = Edge(directory, listener, find_haproxy(), progress.report, edge_settings, grpc)
        try:
            with file_errors(directory):
                edge.start()
            yield edge
        except UnusableCertificate as error:
            # A service manager tries again: a renewal may be about to replace the second file.
            raise StartError(error.message, hint="check `--ssl-certfile`") from error
        except EdgeError as error:
            has_few_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1] < MIN_OPEN_FILES
            hint = RAISE_OPEN_FILES if has_few_files else ""
            raise StartError(error.message, hint=hint) from error
        finally:
            edge.stop()


@contextmanager
def lock_run_directory(run_dir: Path) -> Iterator[None]:
    """Create and lock the run directory. The kernel releases the lock when this process ends."""
    try:
        run_dir.mkdir(exist_ok=True)
        file = (run_dir / "lock").open("a+")
    except OSError as exc:
        raise StartError(
            f"cannot write to `{run_dir}`: {exc.strerror}",
            hint="it is for logs and sockets: serve a config in a directory that you may write to",
        ) from exc
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            lock.seek(0)
            raise StartError(
                f"pid {lock.read().strip()} already serves from this directory",
                hint="stop it with Ctrl-C, or serve a config in another directory on another port",
            ) from exc
        with file_errors(run_dir):
            # Write unbuffered. On a full disk, closing the file would write the buffer again.
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), str(os.getpid()).encode())
        yield
