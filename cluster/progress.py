"""What a person sees while the cluster starts, and the waiting behind it."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress

from deployments.errors import ServeError


class StartError(ServeError):
    """The cluster cannot be started; `hint` says what to do about it."""

    code = "cannot_start"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


POLL_S = 0.25
PROBE_TIMEOUT_S = 2.0
# Never through a proxy from the environment: what is asked is on this box.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

# What is still awaited, or None when it is there.
Missing = Callable[[], str | None]


class Progress:
    """Lines with the seconds since the start; on a terminal a waiting line is rewritten."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._waiting = ""

    def say(self, text: str) -> None:
        """One finished line."""
        # A closed terminal is a reason to stop in order, not to fall over while saying so.
        with suppress(OSError):
            self._erase()
            print(f"[{self._elapsed_s():5.1f} s] {text}", flush=True)

    def wait(self, missing: Missing, failure: Missing, timeout_s: float) -> None:
        """Return when nothing is missing; raises StartError on a failure or after `timeout_s`."""
        give_up_s = time.monotonic() + timeout_s
        while text := missing():
            self._show(text)
            if failed := failure():
                self._erase()
                raise StartError(failed)
            if time.monotonic() > give_up_s:
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


def port_closed(host: str, port: int) -> Missing:
    """Missing until something accepts connections."""

    def missing() -> str | None:
        try:
            with socket.create_connection((host, port), PROBE_TIMEOUT_S):
                return None
        except OSError:
            return f"waiting for port {port}"

    return missing


def not_ready(url: str) -> Missing:
    """Missing until `GET /ready` answers 200; tells what the service itself says is missing."""

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
