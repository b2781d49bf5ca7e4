"""Progress of the start of a cluster, for the terminal and for the service manager."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

from rich.live import Live
from rich.text import Text

from cluster.probes import StatusCheck
from cluster.start_errors import StartError
from deployments.terminal.progress_console import ProgressConsole

POLL_S = 0.25  # between two looks at what is waited for


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
