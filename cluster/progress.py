"""Progress lines of the start of a cluster, and waiting for its parts."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress

from deployments.errors import ServeError


class StartError(ServeError):
    """The cluster cannot be started. `hint` is the remedy."""

    code = "cannot_start"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


POLL_S = 0.25
PROBE_TIMEOUT_S = 2.0
# Ignores proxies of the environment, because all requests go to this host.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

# Returns a description of the missing part, or None.
Missing = Callable[[], str | None]


class StartupProgress:
    """Prints lines with the seconds since the start; overwrites waiting lines on a terminal."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._waiting = ""

    def report(self, text: str) -> None:
        # A closed terminal must not interrupt an orderly stop.
        with suppress(OSError):
            self._erase()
            print(f"[{self._elapsed_s():5.1f} s] {text}", flush=True)

    def wait(self, missing: Missing, failure: Missing, timeout_s: float) -> None:
        """Wait until nothing is missing. Raises StartError on a failure or after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while text := missing():
            self._show(text)
            if message := failure():
                self._erase()
                raise StartError(message)
            if time.monotonic() > deadline_s:
                self._erase()
                raise StartError(f"still waiting after {timeout_s:.0f} s: {text}")
            time.sleep(POLL_S)
        self._erase()

    def _show(self, text: str) -> None:
        if sys.stdout.isatty():
            self._erase()
            print(f"[{self._elapsed_s():5.1f} s] {text}", end="", flush=True)
        elif text != self._waiting:
            print(f"[{self._elapsed_s():5.1f} s] {text}", flush=True)
        self._waiting = text

    def _erase(self) -> None:
        if self._waiting and sys.stdout.isatty():
            print("\r\033[K", end="")
        self._waiting = ""

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s


def notify_systemd(state: str) -> None:
    """Tell the service manager that started this process, if any (sd_notify)."""
    if name := os.environ.get("NOTIFY_SOCKET"):
        address = "\0" + name[1:] if name.startswith("@") else name
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer, suppress(OSError):
            peer.sendto(state.encode(), address)


def check_port_open(host: str, port: int) -> Missing:
    """Build a check that a port accepts connections."""

    def missing() -> str | None:
        try:
            with socket.create_connection((host, port), PROBE_TIMEOUT_S):
                return None
        except OSError:
            return f"waiting for port {port}"

    return missing


def check_ready(url: str) -> Missing:
    """Build a check that `GET /ready` returns 200; it reports the missing parts of the response."""

    def missing() -> str | None:
        try:
            with DIRECT.open(f"{url}/ready", timeout=PROBE_TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            return f"starting: {_reasons(error.read())}"
        except (OSError, http.client.HTTPException):
            return "starting: the ingress"

    return missing


def _reasons(body: bytes) -> str:
    try:
        return ", ".join(json.loads(body)["missing"])
    except (ValueError, KeyError, TypeError):
        return "the ingress"
