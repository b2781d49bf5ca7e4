"""What its control groups leave a process of the machine's cores and memory (Linux, v1 and v2).

A container's own view hides the groups above it, so a limit is looked for in every group from the
process's own up to the root, and the tightest counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path, PurePosixPath

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The groups of one process: by controller its directory, "" for the one tree of version 2."""

    root: Path
    paths: Mapping[str, str]

    @classmethod
    def own(cls) -> ControlGroups:
        """Those of this process; without any limit where there are no control groups."""
        told = _MEMBERSHIP.read_text(encoding="utf-8") if _MEMBERSHIP.is_file() else ""
        return cls(_ROOT, read_membership(told))

    def cores(self) -> int | None:
        """Cores that may be kept busy, rounded up; None without a limit."""
        shares = [share for group in self._groups("cpu") if (share := _cores(group)) is not None]
        return ceil(min(shares)) if shares else None

    def free_bytes(self) -> int | None:
        """Memory that may still be taken; None without a limit."""
        rooms = [room for group in self._groups("memory") if (room := _room(group)) is not None]
        return max(0, min(rooms)) if rooms else None

    def _groups(self, controller: str) -> Iterator[Path]:
        for name in (controller, ""):
            if name in self.paths:
                own = PurePosixPath(self.paths[name].lstrip("/"))
                yield from (self.root / name / path for path in (own, *own.parents))


def read_membership(text: str) -> Mapping[str, str]:
    """The text of /proc/<pid>/cgroup as a directory per controller."""
    lines = (line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2)
    return {name: path for _, names, path in lines for name in names.split(",")}


def _cores(group: Path) -> float | None:
    quota, _, period = _told(group / "cpu.max").partition(" ")
    quota = quota or _told(group / "cpu.cfs_quota_us")
    period = period or _told(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _room(group: Path) -> int | None:
    limit = _told(group / "memory.max") or _told(group / "memory.limit_in_bytes")
    used = _told(group / "memory.current") or _told(group / "memory.usage_in_bytes")
    if not limit.isdigit() or not used.isdigit():
        return None
    # Files that were read stay in memory until somebody needs it; they count as used.
    facts = dict(line.split(" ", 1) for line in _told(group / "memory.stat").splitlines())
    cached = facts.get("total_inactive_file") or facts.get("inactive_file") or "0"
    return int(limit) - int(used) + int(cached)


def _told(path: Path) -> str:
    """What a file of a group says; empty where there is no such file."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
