"""The benchmark command `hostile` with a server in this process."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.__main__ import main
from benchmarks.common.wire import CLOSED, NO_ANSWER, is_complete, parse_response
from benchmarks.hostile import command as hostile_command
from benchmarks.hostile.command import (
    HostileCounts,
    HostileResults,
    build_generated,
    build_tables,
    compare_memory,
    evaluate_goals,
    read_replica_memory,
)
from benchmarks.hostile.requests import HostileRequest
from deployments.config import IngressUserConfig, LimitSettings
from tests.support.fakes import FailingEncoder
from tests.support.http_server import serve_http
from tests.support.in_process import InProcess

SETTINGS = IngressUserConfig(limits=LimitSettings(body_timeout_s=0.5))


@pytest.fixture
def _own_process_is_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server in this process count as one that a launcher has started."""
    monkeypatch.setattr(hostile_command, "find_launcher", lambda _address: os.getpid())


def run_against(server: InProcess, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    with serve_http(server) as running:
        command = ["hostile", "--url", running.url, "--out", str(out), *options]
        status = main([*command, "--requests", "150", "--connections", "4"])
    (path,) = out.glob("hostile-*.json")
    return status, orjson.loads(path.read_bytes())["results"]


@pytest.mark.slow
@pytest.mark.usefixtures("_own_process_is_the_launcher")
def test_run_with_a_healthy_server_passes(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hostile_command, "read_replica_memory", lambda launcher: {"ServeReplica:a:Ingress 1": 100}
    )
    server = InProcess(tiny_store, raise_bugs=False, settings=SETTINGS)
    status, results = run_against(server, tmp_path)
    assert (status, results["failures"], results["unexpected"]) == (0, {}, {})
    assert sum(results["statuses"].values()) == results["requests"] == 150
    assert results["background_requests"] > 0
    assert results["background_failures"] == {}


@pytest.mark.slow
@pytest.mark.usefixtures("_own_process_is_the_launcher")
def test_run_fails_if_the_background_client_fails(
    tiny_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = InProcess(
        tiny_store, raise_bugs=False, settings=SETTINGS, encoder=FailingEncoder(KeyError("a bug"))
    )
    status, results = run_against(broken, tmp_path)
    assert status == 1
    assert results["failures"]
    assert results["background_failures"] == {"500": results["background_requests"]}
    assert "FAILED" in capsys.readouterr().out


RESULTS = HostileResults(
    url="http://127.0.0.1:8000",
    requests=1_234,
    connections=16,
    seconds=9.6,
    statuses={"-1": 3, "400": 1_231},
    failed=0,
    failures={},
    unexpected_count=0,
    unexpected={},
    background_requests=50,
    background_failures={},
    background_max_ms=12.3,
    memory_before={"Ingress 1": 1_000},
    memory_after={"Ingress 1": 1_050},
)


def list_missed(results: HostileResults) -> list[str]:
    return [goal.what for goal in evaluate_goals(results) if not goal.reached]


def test_tables_show_statuses_failures_and_memory() -> None:
    assert list_missed(RESULTS) == []
    # The names are only those of the most frequent failures.
    failed = replace(RESULTS, failed=50, failures={"500 a": 2}, background_failures={"503": 1})
    assert list_missed(failed) == ["unexpected 5xx or no answer", "failed background requests"]
    requests, statuses = build_tables(failed)
    assert requests.rows == [["1,234", "10", "50", "0", "50", "1", "12", "+5.0 %"]]
    assert statuses.rows == [("no answer", "3"), ("400", "1,231")]


def test_a_replica_that_ends_fails_the_run_although_another_one_starts() -> None:
    before = {"CpuEncoder 2": 5, "CpuGenerator 1": 8}
    after = {"CpuEncoder 2": 5, "CpuGenerator 99": 80}
    results = replace(RESULTS, memory_before=before, memory_after=after)
    assert results.memory_ratio == 1.0
    assert results.lost_replicas == ["CpuGenerator 1"]
    assert list_missed(results) == ["replicas that ended"]
    assert build_tables(results)[0].rows[0][-1] == "+0.0 %, CpuGenerator 1 ended"


def test_run_rejects_other_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("http://192.0.2.1:8000", "http://192.0.2.1"):
        assert main(["hostile", "--url", url]) == 1
    assert "is not this host" in capsys.readouterr().err


def test_count_sorts_statuses_into_failures_and_unexpected() -> None:
    counts = HostileCounts()
    rejected = HostileRequest("refused", b"", frozenset({400}))
    for status in (400, 429, 408, 200, 500, 504, NO_ANSWER):
        counts.count(rejected, status)
    counts.count(HostileRequest("made", b"", frozenset()), 418)
    assert counts.unexpected == {"200 refused": 1}
    assert set(counts.failures) == {"500 refused", "504 refused", "-1 refused"}


def test_a_closed_connection_and_503_are_failures_unless_the_attack_expects_them() -> None:
    counts = HostileCounts()
    made = HostileRequest("made", b"", frozenset())
    for status in (CLOSED, 503, 503):
        counts.count(made, status)
        counts.count(HostileRequest("malformed", b"", frozenset({400, CLOSED, 503})), status)
    assert counts.failures == {"0 made": 1, "503 made": 2}
    assert not counts.unexpected


def test_only_generation_may_last_longer_than_the_client_stays() -> None:
    counts = HostileCounts()
    for path in ("/models/a%2Fb", "/v1/chat/completions", "/models/a%2Fc"):
        counts.count(build_generated(f"POST {path} HTTP/1.1".encode(), "a/b"), NO_ANSWER)
    assert counts.failures == {"-1 POST /models/a%2Fc": 1}


def test_only_requests_with_a_deadline_may_miss_it() -> None:
    counts = HostileCounts()
    for head in (b"POST /a HTTP/1.1\r\nX-Request-Timeout-Ms: 1", b"POST /b HTTP/1.1"):
        counts.count(build_generated(head, None), 504)
    assert counts.failures == {"504 POST /b": 1}


def test_compare_memory_ignores_replicas_that_start_or_stop() -> None:
    assert compare_memory({"a": 100, "stopped": 50}, {"a": 130, "started": 50}) == 1.3
    assert compare_memory({"a": 100}, {"b": 100}) is None


def test_is_complete_requires_the_content_length() -> None:
    head = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 2\r\na: b\r\n\r\n"
    assert [is_complete(head + body) for body in (b"", b"{", b"{}")] == [False, False, True]
    assert not is_complete(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n")
    assert not is_complete(b"HTTP/1.1 200 OK\r\n\r\ncontent-length: 1")


def test_parse_response_without_status_line_is_closed() -> None:
    complete = parse_response(b"HTTP/1.1 404 Not Found\r\na: b\r\n\r\n{}")
    assert (complete.status, complete.body) == (404, b"{}")
    assert [parse_response(raw).status for raw in (b"", b"HTTP/1.1", b"garbage here")] == [0, 0, 0]


def test_read_replica_memory_finds_process_titles_of_ray_in_the_session_of_the_server() -> None:
    name = "ray::ServeReplica:hundredfold:Ingress.handle"
    command = ["bash", "-c", f"(exec -a '{name}' sleep 60) & wait"]
    servers = [subprocess.Popen(command, start_new_session=True) for _ in range(2)]
    try:
        memories = []
        for server in servers:
            while not (memory := read_replica_memory(server.pid)):
                assert server.poll() is None
            memories.append(memory)
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    (first,), (second,) = memories
    assert first.startswith("ServeReplica:hundredfold:Ingress ")
    assert first != second
    assert memories[0][first] > 0
