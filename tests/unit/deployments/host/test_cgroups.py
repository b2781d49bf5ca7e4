from __future__ import annotations

from pathlib import Path

import pytest

from deployments.host import machine
from deployments.host.machine import ControlGroups, parse_membership, schedules_sessions

GIB = 1 << 30


def groups(root: Path, files: dict[str, str], **paths: str) -> ControlGroups:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return ControlGroups(root, paths or {"": "/pod/own"})


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"pod/own/cpu.max": "max 100000"}, None),
        ({"pod/own/cpu.max": "200000 100000"}, 2),
        ({"pod/own/cpu.max": "150000 100000"}, 2),
        ({"pod/own/cpu.max": "10000 100000"}, 1),
        ({"pod/own/cpu.max": "max 100000", "pod/cpu.max": "300000 100000"}, 3),
        ({"pod/own/cpu.max": "400000 100000", "cpu.max": "100000 100000"}, 1),
        ({"pod/own/cpu.max": "unreadable"}, None),
        ({"pod/own/cpu.max": ""}, None),
    ],
)
def test_cores_returns_the_lowest_quota_of_all_parents(
    tmp_path: Path, files: dict[str, str], cores: int | None
) -> None:
    assert groups(tmp_path, files).cores() == cores


def test_cores_in_a_v1_container_reads_the_root_quota(tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}
    # The path exists on the host only, not in the container.
    assert groups(tmp_path, files, cpu="/docker/0123").cores() == 3
    unlimited = {"cpu/cpu.cfs_quota_us": "-1"}
    assert groups(tmp_path, unlimited, cpu="/docker/0123").cores() is None


@pytest.mark.parametrize(
    ("files", "paths", "has_weight"),
    [
        ({"pod/own/cpu.weight": "100"}, {"": "/pod/own"}, True),
        ({"pod/cpu.weight": "100"}, {"": "/pod/own"}, True),
        ({"pod/own/cpu.max": "max 100000"}, {"": "/pod/own"}, False),
        ({}, {"cpu": "/", "": "/"}, False),
        ({}, {"cpu": "/docker/0123"}, True),
    ],
)
def test_weight_is_that_of_a_group_or_its_parents(
    tmp_path: Path, files: dict[str, str], paths: dict[str, str], has_weight: bool
) -> None:
    assert groups(tmp_path, files, **paths).has_cpu_weight() is has_weight


@pytest.mark.parametrize(
    ("enabled", "files", "schedules"),
    [("1", {}, True), ("0", {}, False), ("1", {"pod/own/cpu.weight": "100"}, False)],
)
def test_sessions_are_scheduled_only_outside_of_weighted_groups(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    enabled: str,
    files: dict[str, str],
    schedules: bool,
) -> None:
    own = groups(tmp_path, {"autogroup": enabled, **files})
    monkeypatch.setattr("deployments.host.machine._AUTOGROUP", tmp_path / "autogroup")
    monkeypatch.setattr(ControlGroups, "own", lambda: own)
    assert schedules_sessions() is schedules
    (tmp_path / "autogroup").unlink()  # a kernel without the feature
    assert not schedules_sessions()


def test_free_bytes_include_inactive_file_pages(tmp_path: Path) -> None:
    files = {
        "pod/own/memory.max": str(4 * GIB),
        "pod/own/memory.current": str(3 * GIB),
        "pod/own/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7",
        "memory.max": "max",
        "memory.current": str(9 * GIB),
    }
    assert groups(tmp_path, files).free_bytes() == 2 * GIB


def test_free_bytes_returns_the_minimum_of_all_parents(tmp_path: Path) -> None:
    files = {
        "memory/pod/own/memory.limit_in_bytes": str(8 * GIB),
        "memory/pod/own/memory.usage_in_bytes": str(1 * GIB),
        "memory/pod/memory.limit_in_bytes": str(8 * GIB),
        "memory/pod/memory.usage_in_bytes": str(7 * GIB),
        "memory/pod/memory.stat": "inactive_file 1\ntotal_inactive_file 2",
    }
    assert groups(tmp_path, files, memory="/pod/own").free_bytes() == GIB + 2


def test_free_bytes_without_a_limit_is_none(tmp_path: Path) -> None:
    assert groups(tmp_path, {}).free_bytes() is None
    assert groups(tmp_path, {"memory.max": "max", "memory.current": "5"}).free_bytes() is None


def test_free_bytes_above_the_limit_is_zero(tmp_path: Path) -> None:
    files = {"memory.max": "5", "memory.current": "9"}
    assert groups(tmp_path, files).free_bytes() == 0


@pytest.mark.parametrize(
    ("files", "paths", "kills"),
    [
        ({}, {"": "/pod/own"}, 0),
        ({"pod/own/memory.events": "low 0\noom 9\noom_kill 3"}, {"": "/pod/own"}, 3),
        # v1; the path exists on the host only, not in the container
        ({"memory/memory.oom_control": "under_oom 0\noom_kill 2"}, {"memory": "/docker/01"}, 2),
    ],
)
def test_processes_that_the_kernel_killed_are_counted(
    tmp_path: Path, files: dict[str, str], paths: dict[str, str], kills: int
) -> None:
    assert groups(tmp_path, files, **paths).oom_kills() == kills


def test_parse_membership_maps_controllers_to_paths() -> None:
    text = "4:memory:/a/b\n2:cpu,cpuacct:/c\n1:name=systemd:/\n0::/d:with:colons\nnonsense\n"
    paths = parse_membership(text)
    assert (paths["memory"], paths["cpu"], paths["cpuacct"]) == ("/a/b", "/c", "/c")
    assert paths[""] == "/d:with:colons"


def test_own_control_groups_are_those_of_the_membership(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/pod/own\n")
    files = {"cpu.max": "200000 100000", "memory.max": f"{GIB}", "memory.current": "1000"}
    groups(tmp_path, {f"pod/own/{name}": text for name, text in files.items()})
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    monkeypatch.setattr(machine, "_MEMBERSHIP", membership)
    own = ControlGroups.own()
    assert (own.cores(), own.free_bytes()) == (2, GIB - 1000)
    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "absent")
    without = ControlGroups.own()
    assert (without.cores(), without.free_bytes()) == (None, None)


def test_own_control_groups_of_this_host_are_readable() -> None:
    own = ControlGroups.own()
    assert own.cores() is None or own.cores() >= 1
    assert own.free_bytes() is None or own.free_bytes() > 0
