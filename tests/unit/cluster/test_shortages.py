"""Failed starts for lack of memory, or of space for the files of Ray."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.shortages import MIN_RAY_BYTES, check_space, explain_shortages
from cluster.start_errors import StartError, UnusableConfig
from deployments.host.machine import ControlGroups


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the events of this process's control group. Nothing was killed yet."""
    file = tmp_path / "memory.events"
    file.write_text("oom_kill 5\n")
    monkeypatch.setattr(ControlGroups, "own", lambda: ControlGroups(tmp_path, {"": "/"}))
    return file


def set_free_space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Set the free space for ordinary users. Root has 8 MB more, which are reserved."""
    disk = SimpleNamespace(f_bavail=free, f_bfree=free + (8 << 20), f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _path: disk)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def test_failed_start_names_the_processes_that_the_kernel_killed(
    events: Path, tmp_path: Path
) -> None:
    def fail() -> None:
        events.write_text("oom_kill 12\n")
        raise StartError("still waiting after 180 s")

    with pytest.raises(StartError) as raised, explain_shortages(tmp_path):
        fail()
    assert raised.value.message == (
        "still waiting after 180 s\nprocesses that the kernel has killed for lack of memory: 7"
    )
    assert "`hundredfold doctor`" in raised.value.hint


@pytest.mark.usefixtures("events")
def test_failed_start_names_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free_space(monkeypatch, 300_000)
    with pytest.raises(StartError) as raised, explain_shortages(tmp_path / "missing"):
        raise StartError("still waiting after 180 s")
    assert f"`{tmp_path}/missing` has 0.3 MB of free space" in raised.value.message
    assert "$RAY_TMPDIR" in raised.value.hint


@pytest.mark.usefixtures("events")
def test_other_failed_start_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(UnusableConfig) as raised, explain_shortages(tmp_path):
        raise UnusableConfig("no such model", hint="build it")
    assert (raised.value.message, raised.value.hint) == ("no such model", "build it")


def test_shortage_is_told_beside_the_other_cause(events: Path, tmp_path: Path) -> None:
    def fail() -> None:
        events.write_text("oom_kill 6\n")
        raise UnusableConfig("no such model", hint="build it")

    with pytest.raises(UnusableConfig) as raised, explain_shortages(tmp_path):
        fail()
    assert raised.value.message.startswith("no such model\nprocesses that the kernel has killed")
    assert raised.value.hint.startswith("build it; `hundredfold doctor` compares")


def test_start_needs_space_for_the_logs_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free_space(monkeypatch, MIN_RAY_BYTES)
    check_space(tmp_path)
    set_free_space(monkeypatch, MIN_RAY_BYTES - 1)
    with pytest.raises(StartError, match="Ray writes its logs there"):
        check_space(tmp_path)


def test_root_may_use_the_reserved_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_free_space(monkeypatch, 0)
    with pytest.raises(StartError, match="free space"):
        check_space(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    check_space(tmp_path)
