from __future__ import annotations

from rich.console import Console


class ProgressConsole(Console):
    """Console that becomes quiet when the reader of its stream has gone.

    Rich would end the thread that writes, and with it a build, or the supervision of a server.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
