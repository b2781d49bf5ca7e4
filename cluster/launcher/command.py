"""`hundredfold serve`: the options of the server on a single host."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.default_config import CONFIG_HELP, find_config
from cluster.edge.certificate import CertificateFiles
from cluster.edge.haproxy_config import METRICS_HOST
from cluster.launcher.launched_config import DEFAULT_LIMITS, ServeOptions
from cluster.launcher.local_ports import DEFAULT_PORTS
from cluster.launcher.new_session import leads_own_session, run_in_new_session
from cluster.launcher.server import serve_until_stopped
from cluster.launcher.stop_signals import StopSignal, list_stop_signals, stop_signals_raise
from cluster.ports import PORTS
from cluster.processes import SERVE_STOP_S
from cluster.start_errors import StartError, UnusableConfig
from deployments.artifacts.store import is_model_id
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


def parse_port(text: str) -> int:
    """Parse the number of a TCP port."""
    if not text.isdecimal() or int(text) not in PORTS:
        raise argparse.ArgumentTypeError(
            f"`{text}` is not a port: use a number from {PORTS[0]} to {PORTS[-1]}"
        )
    return int(text)


def parse_model_id(text: str) -> str:
    """Parse the id of a model. Builds of other sources have a command of their own."""
    if not is_model_id(text):
        raise argparse.ArgumentTypeError(
            f"`{text}` is not a model id; build other sources with `hundredfold build`"
        )
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", type=Path, help=CONFIG_HELP)
    parser.add_argument(
        "--model",
        type=parse_model_id,
        action="append",
        default=[],
        dest="models",
        metavar="ID",
        help="model id of the store or hub id, repeatable: serve these instead of `models` of the "
        "config, and build those that the store lacks before the start",
    )
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
    parser.add_argument(
        "--stop-timeout-s",
        type=positive_seconds,
        default=SERVE_STOP_S,
        metavar="S",
        help="seconds that running requests have after a stop signal, up to "
        "`graceful_shutdown_timeout_s` of their replica (default: %(default)s)",
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
        models=tuple(dict.fromkeys(arguments.models)),
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
        stop_timeout_s=arguments.stop_timeout_s,
    )
    try:
        with stop_signals_raise():
            return serve_until_stopped(settings)
    except StopSignal:
        return 0
    except StartError as error:
        code = UNUSABLE_CONFIG if isinstance(error, UnusableConfig) else FAILED
        return print_error(error.message, error.hint, code=code)
