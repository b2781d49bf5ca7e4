"""One HAProxy process on inherited listening sockets."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.processes import end_with_parent
from deployments.errors import ServeError
from deployments.files import write_atomically

START_S = 10.0  # time limit for a new process to answer on its admin socket
POLL_S = 0.02
COMMAND_S = 3.0  # time limit for the answer to an admin command


class EdgeError(ServeError):
    """HAProxy could not be started."""

    code = "edge_failed"


@dataclass(frozen=True, slots=True)
class HaproxyFiles:
    """Files of one configuration. A restarted process uses the same files."""

    binary: str
    config: Path
    text: str  # content of the configuration file
    admin_socket: Path
    log: Path  # output of the process; a restarted process appends to it
    certificate: Path | None = None
    pem: bytes = b""  # content of `certificate`

    def write(self) -> None:
        self.config.write_text(self.text, encoding="utf-8")
        if self.certificate is not None:
            write_atomically(self.certificate, self.pem, mode=0o600)

    def remove(self) -> None:
        """Remove the files of a process that has not started, or that no restart needs any more."""
        for path in (self.config, self.admin_socket, self.certificate):
            if path is not None:
                path.unlink(missing_ok=True)


class HaproxyProcess:
    """A serving HAProxy process. The kernel kills it if the thread that called `start` ends."""

    def __init__(self, process: Process, files: HaproxyFiles) -> None:
        self.files = files
        self._process = process

    @classmethod
    async def start(cls, files: HaproxyFiles, listeners: Sequence[int]) -> HaproxyProcess:
        """Start a process and wait until it serves. Raises EdgeError if it does not.

        `listeners` are file descriptors.
        """
        with_parent = end_with_parent(signal.SIGKILL)
        command = [*with_parent, files.binary, "-db", "-f", str(files.config)]
        with files.log.open("ab") as output:
            started = cls(
                await asyncio.create_subprocess_exec(
                    *command,
                    stdin=DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=listeners,
                ),
                files,
            )
        await started._wait_until_serving()
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    def read_cpu_s(self) -> float:
        """Return the CPU time of the process in seconds; 0 after its end."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    async def command(self, line: bytes, timeout_s: float = COMMAND_S) -> bytes:
        """Send one line to the admin socket and return the answer.

        Raises OSError if the socket cannot be reached or does not answer within `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(self.files.admin_socket)
            try:
                writer.write(line)
                return await reader.read()
            finally:
                writer.close()

    async def is_serving(self, timeout_s: float = COMMAND_S) -> bool:
        """Return whether this process, and not an earlier one, answers on the admin socket."""
        try:
            return b"\nPid: %d\n" % self.pid in await self.command(b"show info\n", timeout_s)
        except OSError:
            return False

    async def wait(self) -> int:
        """Wait until the process ends and return its exit code."""
        return await self._process.wait()

    def drain(self) -> None:
        """Let HAProxy accept no more connections and end after the last request."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def _wait_until_serving(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                while not await self.is_serving():
                    if self._process.returncode is not None:
                        raise EdgeError(f"HAProxy ended at its start: {_tail(self.files.log)}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            self.kill()
            raise EdgeError(
                f"HAProxy did not serve within {START_S:g} s: {_tail(self.files.log)}"
            ) from error


def _tail(path: Path) -> str:
    return "\n".join(path.read_text("utf-8", "replace").splitlines()[-3:])
