"""The server under test, which a benchmark starts on a free port."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.common.report import REPOSITORY
from benchmarks.servers.process_kinds import KINDS, find_processes
from benchmarks.servers.processes import ServerCommand, is_ready, run_server
from cluster.default_config import CONFIG_NAME
from cluster.launcher.local_environment import find_ray_directory
from cluster.ports import find_free_port

PREFERRED_PORT = 8600
READY_TIMEOUT_S = 60.0  # maximum wait until all processes run and the server is ready
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Server:
    """A server of this project that a benchmark started."""

    address: ServerAddress
    launcher: int  # pid of the process that starts all other processes of the server

    async def wait_until_complete(self) -> None:
        """Wait until a process of every kind runs and the server is ready.

        Raises BenchmarkError after READY_TIMEOUT_S.
        """
        deadline_s = time.perf_counter() + READY_TIMEOUT_S
        while True:
            missing = await asyncio.to_thread(self._find_missing)
            ready = await asyncio.to_thread(is_ready, self.address.port, "/ready")
            if ready and not missing:
                return
            if time.perf_counter() > deadline_s:
                raise BenchmarkError(
                    f"the server has not recovered after {READY_TIMEOUT_S:g} s: ready {ready}, "
                    f"missing processes {missing}",
                    hint="look at the logs of Ray, usually in "
                    f"{find_ray_directory()}/ray/session_latest/logs",
                )
            await asyncio.sleep(POLL_S)

    def _find_missing(self) -> list[str]:
        """Return the kinds of which no process runs."""
        return [name for name, kind in KINDS.items() if not find_processes(self.launcher, kind)]


def build_serve_command(config: Path, *options: str) -> ServerCommand:
    """Return the command that serves `config` on a free port.

    `options` are further options of `hundredfold serve`.
    """
    port = find_free_port(PREFERRED_PORT, 0)
    # `run_server` drops the PYTHONPATH of this process. Pass it to the server, because it may
    # contain the packages of this environment.
    paths = (str(REPOSITORY), os.environ.get("PYTHONPATH", ""))
    return ServerCommand(
        name="hundredfold",
        arguments=[
            *(sys.executable, "-m", "hundredfold", "serve", str(config)),
            *("--host", "127.0.0.1", "--port", str(port), *options),
        ],
        port=port,
        ready_path="/ready",
        environment={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )


@contextmanager
def start_server(config: Path, logs: Path) -> Iterator[Server]:
    """Start a server with a copy of `config` on a free port. End it afterwards.

    The launcher writes to `<logs>/hundredfold.log`.
    """
    with tempfile.TemporaryDirectory(prefix="server-") as directory:
        own = Path(directory) / CONFIG_NAME
        own.write_bytes(config.read_bytes())
        with run_server(build_serve_command(own), logs, REPOSITORY) as process:
            if process.pid is None:
                raise AssertionError("bug: the server has no process")
            yield Server(process.address, process.pid)
