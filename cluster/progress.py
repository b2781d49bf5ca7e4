"""Progress lines of the start of a cluster, and waiting for its parts."""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.live import Live
from rich.text import Text

from deployments.terminal.command_line import HintedError
from deployments.terminal.progress_console import ProgressConsole


class StartError(HintedError):
    """The cluster cannot be started. `hint` is the remedy."""

    code = "cannot_start"


class UnusableConfig(StartError):
    """The config must be changed before it can be served. A service manager does not try again."""

    code = "unusable_config"


# Errors of a host that lacks processes, memory or file descriptors. Its disk is not the cause.
_HOST_ERRORS = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
_WRITE_HINT = "free space on its disk, or let this user write there"


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Raise StartError in place of an OSError. The message names the error's file, else `path`."""
    try:
        yield
    except OSError as exc:
        raise StartError(
            f"cannot use `{exc.filename or path}`: {exc.strerror or exc}",
            hint="" if exc.errno in _HOST_ERRORS else _WRITE_HINT,
        ) from exc


POLL_S = 0.25  # between two looks at what is waited for
PROBE_TIMEOUT_S = 2.0
# Opener for requests to this host: it ignores proxies in the environment.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

# Returns a description of what is missing or has failed, or None.
StatusCheck = Callable[[], str | None]


class StartupProgress:
    """Progress lines on stderr with the seconds since the start.

    A terminal shows the missing part in a live line. Output errors are ignored, because a closed
    terminal must not interrupt an orderly stop.
    """

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._console = ProgressConsole(stderr=True, color_system=None)
        self._waiting = ""

    def report(self, text: str) -> None:
        with suppress(OSError):
            self._console.out(self._stamp(text), highlight=False)

    def wait(self, missing: StatusCheck, failure: StatusCheck, timeout_s: float) -> None:
        """Wait until nothing is missing. Raises StartError on a failure or after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        # No refresh thread, because it would not notice that the terminal was closed.
        live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        try:
            while text := missing():
                self._show(live, text)
                if message := failure():
                    raise StartError(message)
                if time.monotonic() > deadline_s:
                    raise StartError(f"still waiting after {timeout_s:.0f} s: {text}")
                time.sleep(POLL_S)
        finally:
            self._waiting = ""
            with suppress(OSError):
                live.stop()

    def _show(self, live: Live, text: str) -> None:
        if not self._console.is_terminal:
            if text != self._waiting:
                self.report(text)
        else:
            with suppress(OSError):
                live.start()
                live.update(Text(self._stamp(text)), refresh=True)
        self._waiting = text

    def _stamp(self, text: str) -> str:
        return f"[{time.monotonic() - self._started_s:5.1f} s] {text}"


def notify_systemd(state: str) -> None:
    """Send `state` to the service manager, if one started this process (sd_notify)."""
    if name := os.environ.get("NOTIFY_SOCKET"):
        address = "\0" + name[1:] if name.startswith("@") else name
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer, suppress(OSError):
            peer.sendto(state.encode(), address)


def check_port_open(host: str, port: int) -> StatusCheck:
    """Return a check that a port accepts connections."""

    def missing() -> str | None:
        try:
            with socket.create_connection((host, port), PROBE_TIMEOUT_S):
                return None
        except OSError:
            return f"waiting for port {port}"

    return missing


def check_ready(url: str) -> StatusCheck:
    """Return a check that `GET /ready` returns 200. The check reports the missing parts.

    The certificate of an HTTPS server on this host is not verified: it does not name the loopback
    address.
    """
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified)
    )

    def missing() -> str | None:
        try:
            with opener.open(f"{url}/ready", timeout=PROBE_TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            return f"starting: {_read_reasons(error)}"
        except (OSError, http.client.HTTPException):
            return "starting: the ingress"

    return missing


def _read_reasons(error: urllib.error.HTTPError) -> str:
    try:
        return ", ".join(json.loads(error.read())["missing"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return "the ingress"
