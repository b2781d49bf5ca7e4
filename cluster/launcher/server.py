"""The server on a single host: start Ray and Serve, keep them running, clean up on exit.

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

import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cluster.access import key_file_environment
from cluster.config_entries import find_store, read_args
from cluster.diagnosis import MIN_OPEN_FILES, RAISE_OPEN_FILES
from cluster.edge.certificate import UnusableCertificate
from cluster.edge.haproxy_config import ClientLimits
from cluster.edge.haproxy_process import EdgeError
from cluster.edge.supervisor import Edge, EdgeSettings
from cluster.environment import LOG_LIMIT_VARIABLES
from cluster.gpu_support import gpu_environment, read_gpu_support
from cluster.launcher.launched_config import LaunchedConfig, ServeOptions, move_behind_edge
from cluster.launcher.local_environment import find_haproxy, local_environment, ray_temp_environment
from cluster.launcher.local_ports import ClientPorts, LocalPorts, choose_ports
from cluster.launcher.missing_models import build_missing_models
from cluster.launcher.ray_host import RayHost
from cluster.launcher.startup_messages import startup_messages
from cluster.launcher.stop_signals import StopSignal, count_stop_signals
from cluster.ports import format_address, open_listener
from cluster.processes import ChildProcesses, kill_previous_run, private_directory
from cluster.progress import StartupProgress, notify_systemd
from cluster.start_errors import StartError, file_errors
from deployments.builds.process import HUB_OFFLINE_VARIABLE


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
            for args in read_args(served.last):
                build_missing_models(settings.models, find_store(args), run_dir, progress)
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
        wait = f"running requests have {settings.stop_timeout_s:g} s"
        progress.report(f"stopping: {wait}; a second Ctrl-C ends them")
        return 0
    finally:
        count_later = count_stop_signals()
        remaining = host.children.stop(settings.stop_timeout_s, lambda: count_later() > 0)
        result = f"still running: {remaining}" if remaining else "all processes have ended"
        progress.report(f"stopped; {result}")


def build_environment(settings: ServeOptions, ports: LocalPorts, edge: Path) -> dict[str, str]:
    """Build the environment of Ray, which has several directories. `edge`: that of the edge."""
    token = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return {
        **os.environ,
        **({"RAY_AUTH_TOKEN_PATH": os.path.abspath(token)} if token else {}),
        **local_environment(ports, edge),
        **{name: os.environ[name] for name in LOG_LIMIT_VARIABLES if name in os.environ},
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
