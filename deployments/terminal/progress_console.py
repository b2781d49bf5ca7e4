from __future__ import annotations

from rich.console import Console


class ProgressConsole(Console):
    """Console that becomes quiet when the reader of its stream has gone.

    By default, Rich ends the thread that writes. A build or the supervision of a server would then
    end too.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
