"""Ray's session directories: logs and sockets, one directory per start of Ray.

All servers of a user share the directory that contains them. There Ray's link `session_latest`
names the session that started last, whichever server started it.
"""

from __future__ import annotations

import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import psutil

LINK_NAME = "ray"  # in a run directory: link to the session of its server
# Number of sessions that stay in any case: logs show why former servers ended, and a session that
# starts has no processes yet.
KEPT_SESSIONS = 5
# Start with microseconds, and the id of the process that started Ray.
_SESSION = re.compile(r"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+_\d+")


def list_sessions(ray_directory: Path) -> list[Path]:
    """Return the sessions below `ray_directory`, which RAY_TMPDIR names, the oldest first."""
    paths = sorted((ray_directory / "ray").glob("session_*"))
    return [path for path in paths if _SESSION.fullmatch(path.name)]


def find_session(ray_directory: Path, pid: int) -> Path | None:
    """Return the session of the Ray that process `pid` has started."""
    return next((p for p in reversed(list_sessions(ray_directory)) if _read_pid(p) == pid), None)


def link_session(run_dir: Path, session: Path) -> None:
    """Let LINK_NAME in the run directory name `session`.

    A link that cannot be written, as on a full disk, must not prevent a restart.
    """
    link, temporary = run_dir / LINK_NAME, run_dir / f".{LINK_NAME}"
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(session)
        temporary.replace(link)


def remove_ended_sessions(ray_directory: Path) -> None:
    """Remove all sessions whose processes have ended, except the last KEPT_SESSIONS."""
    for session in list_sessions(ray_directory)[:-KEPT_SESSIONS]:
        if not _has_processes(session):
            shutil.rmtree(session, ignore_errors=True)


def _has_processes(session: Path) -> bool:
    # Containers that share the directory do not see the processes of each other, but the sockets.
    if psutil.pid_exists(_read_pid(session)) or _answers(session / "sockets" / "raylet"):
        return True
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(session.name in argument for argument in process.cmdline()):
                return True
    return False


def _read_pid(session: Path) -> int:
    return int(session.name.rpartition("_")[2])


def _answers(path: Path) -> bool:
    """Return whether a process listens on a Unix socket, even if it accepts no connections."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except BlockingIOError:  # the backlog of a process that hangs is full
            return True
        except OSError:
            return False
    return True
