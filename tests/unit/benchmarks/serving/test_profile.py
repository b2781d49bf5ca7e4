from __future__ import annotations

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.serving import profile
from benchmarks.serving.profile import (
    OTHER_RAY,
    classify_process,
    count_functions,
    summarize_costs,
)


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
    before = {("Ingress", 1, 1, "main"): 5.0, ("Ingress", 1, 2, "io"): 1.0}
    after = {
        ("Ingress", 1, 1, "main"): 6.0,
        ("Ingress", 1, 2, "io"): 1.5,
        ("Ingress", 1, 3, "io"): 0.5,  # started meanwhile
        ("haproxy", 9, 9, "main"): 0.1,
    }
    ingress, haproxy = summarize_costs(before, after, requests=1_000)
    assert (ingress.process, ingress.cpu_ms_per_request) == ("Ingress", pytest.approx(2.0))
    assert ingress.threads == {"main": pytest.approx(1.0), "io": pytest.approx(1.0)}
    assert haproxy.cpu_ms_per_request == pytest.approx(0.1)


def test_functions_are_counted_once_per_stack() -> None:
    stacks = """run (a.py:1);walk (b.py:2);walk (b.py:9) 30
run (a.py:1);parse (c.py:4) 10
"""
    shares = {share.function: share for share in count_functions(stacks)}
    assert shares["run (a.py)"].total == 1.0
    assert (shares["walk (b.py)"].total, shares["walk (b.py)"].own) == (0.75, 0.75)
    assert shares["parse (c.py)"].own == 0.25


def test_missing_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile.psutil, "process_iter", lambda: iter(()))
    with pytest.raises(BenchmarkError, match="no replica"):
        profile.read_thread_times()
