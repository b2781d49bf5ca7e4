from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.__main__ import main
from benchmarks.common.errors import BenchmarkError
from benchmarks.profile import command as profile
from benchmarks.profile.command import (
    OTHER_RAY,
    ProcessCost,
    ProfileLevel,
    ThreadUsage,
    classify_process,
    count_functions,
    read_stacks,
    read_threads,
    sample_stacks,
    summarize_costs,
)

LAUNCHER = os.getpid()  # a process that leads no session of a server


@pytest.mark.parametrize(
    ("command", "name", "kind"),
    [
        ("ray::ServeReplica:hundredfold:Ingress", "ray::ServeRepli", "Ingress"),
        ("/usr/sbin/haproxy -f x.cfg", "haproxy", "haproxy"),
        ("ray::ProxyActor", "ray::ProxyActor", OTHER_RAY),
        ("/site-packages/ray/core/src/ray/raylet/raylet --x", "raylet", OTHER_RAY),
        ("python -m pytest", "python", None),
    ],
)
def test_process_is_classified_by_its_title(command: str, name: str, kind: str | None) -> None:
    assert classify_process(command, name) == kind


def test_costs_are_differences_per_request() -> None:
    before = {
        ("Ingress", 1, 1, "main"): ThreadUsage(5.0, 700),
        ("Ingress", 1, 2, "io"): ThreadUsage(1.0, 40),
    }
    after = {
        ("Ingress", 1, 1, "main"): ThreadUsage(6.0, 2_700),
        ("Ingress", 1, 2, "io"): ThreadUsage(1.5, 540),
        ("Ingress", 1, 3, "io"): ThreadUsage(0.5, 500),  # a thread that started in between
        ("haproxy", 9, 9, "main"): ThreadUsage(0.1, 1_000),
    }
    ingress, haproxy = summarize_costs(before, after, requests=1_000)
    assert (ingress.process, ingress.cpu_ms_per_request) == ("Ingress", pytest.approx(2.0))
    assert ingress.threads == {"main": pytest.approx(1.0), "io": pytest.approx(1.0)}
    assert haproxy.cpu_ms_per_request == pytest.approx(0.1)
    assert (ingress.wake_ups_per_request, haproxy.wake_ups_per_request) == (3.0, 1.0)


def test_wake_ups_are_a_column_of_the_table() -> None:
    cost = ProcessCost(
        process="Ingress", cpu_ms_per_request=0.25, wake_ups_per_request=4.5, threads={"main": 0.2}
    )
    level = ProfileLevel(connections=1, requests=10, p50_ms=2.0, processes=[cost], functions={})
    (table,) = level.tables()
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["CPU ms per request"], row["wake-ups per request"]) == ("0.250", "4.50")


def test_threads_that_wait_are_counted_as_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "find_members", lambda _: iter((psutil.Process(),)))
    monkeypatch.setattr(profile, "classify_process", lambda *_: "Ingress")

    def read_main() -> ThreadUsage:
        return read_threads(LAUNCHER)["Ingress", os.getpid(), os.getpid(), "main"]

    before = read_main()
    for _ in range(5):
        time.sleep(0.001)
    assert read_main().wake_ups >= before.wake_ups + 5


def test_functions_are_counted_once_per_stack() -> None:
    stacks = """run (a.py:1);walk (b.py:2);walk (b.py:9) 30
run (a.py:1);parse (c.py:4) 10
"""
    shares = {share.function: share for share in count_functions(stacks)}
    assert shares["run (a.py)"].total == 1.0
    assert (shares["walk (b.py)"].total, shares["walk (b.py)"].own) == (0.75, 0.75)
    assert shares["parse (c.py)"].own == 0.25


def test_every_replica_of_a_deployment_has_a_stack_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho run >${10}\n")  # the argument of --output
    program.chmod(0o755)
    monkeypatch.setattr(profile.shutil, "which", lambda *_, **__: str(program))
    processes = (("Ingress", 1), ("Ingress", 2), ("CpuEncoder", 3), ("haproxy", 4))
    threads = {(kind, pid, pid, "main"): ThreadUsage() for kind, pid in processes}
    monkeypatch.setattr(profile, "read_threads", lambda _: threads)
    with sample_stacks(LAUNCHER, tmp_path, connections=4, seconds=1.0) as stacks:
        pass
    found = {name: len(set(paths)) for name, paths in stacks.items()}
    assert found == {"Ingress": 2, "CpuEncoder": 1}
    assert all(path.read_text() == "run\n" for paths in stacks.values() for path in paths)


def test_stack_file_that_py_spy_did_not_write_is_named(tmp_path: Path) -> None:
    written, missing = tmp_path / "one.txt", tmp_path / "two.txt"
    written.write_text("run 1\n")
    assert read_stacks([written, written]) == "run 1\nrun 1\n"
    with pytest.raises(BenchmarkError, match=f"py-spy did not write `{missing}`"):
        read_stacks([written, missing])


def test_replica_of_another_server_is_no_replica_of_this_one() -> None:
    title = "ray::ServeReplica:hundredfold:Ingress"
    with subprocess.Popen(["bash", "-c", f"exec -a '{title}' sleep 60"]) as stranger:
        try:
            while title not in psutil.Process(stranger.pid).cmdline():
                assert stranger.poll() is None
            with pytest.raises(BenchmarkError, match="the server has no replica"):
                read_threads(LAUNCHER)
        finally:
            stranger.kill()


def test_py_spy_is_looked_for_before_the_first_level(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(profile, "find_launcher", lambda _: LAUNCHER)
    assert main(["profile", "--samples", "--url", "http://127.0.0.1:9"]) == 1
    assert "py-spy is not installed" in capsys.readouterr().err
