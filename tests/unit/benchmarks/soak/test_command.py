from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from benchmarks.__main__ import main
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.common.wire import HttpExchange
from benchmarks.faults import load as load_module
from benchmarks.faults.load import CUT, RIGHT, WRONG, KnownRequest, Observation, classify_answer
from benchmarks.servers.own_server import Server
from benchmarks.servers.process_kinds import KINDS
from benchmarks.soak import command as soak_module
from benchmarks.soak.command import (
    SoakRecord,
    SoakResults,
    build_memory_table,
    build_table,
    count_outcomes,
    evaluate_goals,
    soak,
)
from benchmarks.soak.memory import (
    MIN_SAMPLES,
    OTHERS,
    MemoryLog,
    MemorySample,
    ProcessMemory,
    build_growth_table,
    summarize_kinds,
)
from benchmarks.soak.mixed_load import RATES, is_close, parse_stream

SPARED = list(KINDS)

WHOLE = (
    b'data: {"choices": [{"text": "Hel"}]}\n\ndata: {"choices": [{"text": "lo"}]}\n\n'
    b'data: {"choices": []}\n\ndata: [DONE]\n\n'
)
FAILED = b'data: {"choices": [{"text": "Hel"}]}\n\ndata: {"error": {}}\n\ndata: [DONE]\n\n'


def results(sizes: list[float], outcomes: dict[str, int] | None = None) -> SoakResults:
    samples = [MemorySample(10.0 * n, size, 5) for n, size in enumerate(sizes)]
    return SoakResults(60.0, {"gcs": 2}, {"sentence": outcomes or {RIGHT: 3}}, samples, [])


def test_chunks_of_a_stream_are_joined() -> None:
    assert parse_stream(WHOLE)["choices"][0]["text"] == "Hello"


@pytest.mark.parametrize("body", [b"", WHOLE[:40], WHOLE.replace(b"data: [DONE]", b""), FAILED])
def test_stream_that_ends_early_is_cut_not_wrong(body: bytes) -> None:
    request = KnownRequest("stream", b"", lambda value: True, parse_stream)
    assert classify_answer(request, HttpExchange(200, b"", body)) == CUT


@pytest.mark.parametrize(
    ("value", "same"),
    [
        ([{"label": "a", "score": 0.51}], True),
        ([{"label": "a", "score": 0.6}], False),
        ([{"label": "b", "score": 0.5}], False),
        ([{"label": "a"}], False),
        ([], False),
        ({}, False),
    ],
)
def test_values_are_compared_with_a_tolerance(value: Any, same: bool) -> None:
    assert is_close([{"label": "a", "score": 0.5}], value) is same


def test_growth_ignores_the_warm_up() -> None:
    _, growth = evaluate_goals(results([10, 50, 100, 100, 100, 100, 110, 110]))
    assert growth.value == pytest.approx(0.1)


def test_growth_of_processes_that_are_killed_again_and_again_is_shown() -> None:
    lives = [ProcessMemory("ingress") for _ in range(3)]
    for number, life in enumerate(lives):
        for sample in range(18):  # 10 MiB per min for three minutes
            life.add(180.0 * number + 10.0 * sample, 100.0 + 10.0 * sample / 6)
    short = ProcessMemory("ingress")
    short.add(0.0, 500.0)
    (growth,) = summarize_kinds([*lives, short])
    assert (growth.kind, growth.processes, growth.longest_s) == ("ingress", 3, 170.0)
    assert growth.mib_per_min == pytest.approx(10.0)
    (row,) = build_growth_table([growth]).rows
    assert row == ("ingress", "3", "2.8 min", "+10.00")


def test_growth_while_a_process_warms_up_is_left_out() -> None:
    life = ProcessMemory("encoder")
    for sample, mib in enumerate([100, 200, 250, 280, 300, 300, 300, 300]):
        life.add(10.0 * sample, mib)
    assert life.mib_per_min == pytest.approx(0.0)


def test_memory_log_reads_live_processes() -> None:
    log = MemoryLog()
    for number in range(MIN_SAMPLES):
        log.read([psutil.Process(), psutil.Process(os.getppid())], float(number))
    assert [sample.processes for sample in log.totals] == [2] * MIN_SAMPLES
    assert log.totals[0].mib > 1
    (growth,) = log.summarize_kinds()
    assert (growth.kind, growth.processes) == (OTHERS, 2)


def test_growth_of_a_short_run_is_not_measured() -> None:
    _, growth = evaluate_goals(results([1.0, 2.0, 3.0]))
    assert (growth.value, growth.reached) == (None, None)


class CompleteServer(Server):
    async def wait_until_complete(self) -> None:
        pass


async def test_soak_fails_if_the_memory_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def build_no_requests(_address: ServerAddress) -> dict[str, list[KnownRequest]]:
        return {kind: [] for kind in RATES}

    def fail(_launcher: int) -> Any:
        raise OSError("no memory to read")

    monkeypatch.setattr(soak_module, "SAMPLE_S", 0.0)
    monkeypatch.setattr(soak_module, "build_mixed_requests", build_no_requests)
    monkeypatch.setattr(soak_module, "find_members", fail)
    with pytest.raises(OSError, match="no memory to read"):
        await soak(CompleteServer(ServerAddress("127.0.0.1", 9), 0), 0.05, [], 0, SoakRecord())


class LostServer(Server):
    """A server that is complete at first, and does not recover."""

    calls = 0

    async def wait_until_complete(self) -> None:
        LostServer.calls += 1
        if LostServer.calls > 1:
            raise BenchmarkError("the server has not recovered after 60 s")


@pytest.mark.parametrize("answered", [True, False])
def test_run_whose_server_does_not_recover_keeps_its_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answered: bool
) -> None:
    async def build_requests(_address: ServerAddress) -> dict[str, list[KnownRequest]]:
        request = KnownRequest("label", b"", lambda _: True)
        return {kind: [request] if answered and kind == "label" else [] for kind in RATES}

    async def send_raw(*_: Any) -> HttpExchange:
        return HttpExchange(200, b"", b"{}")

    @contextmanager
    def start_server(_config: Path, _logs: Path) -> Iterator[Server]:
        yield LostServer(ServerAddress("127.0.0.1", 9), os.getpid())

    LostServer.calls = 0
    monkeypatch.setattr(soak_module, "build_mixed_requests", build_requests)
    monkeypatch.setattr(soak_module, "start_server", start_server)
    monkeypatch.setattr(load_module, "send_raw", send_raw)
    assert main(["soak", "--seconds", "0.1", "--spare", *SPARED, "--out", str(tmp_path)]) == 1
    written = [orjson.loads(path.read_bytes()) for path in tmp_path.glob("soak-*.json")]
    reasons = [result["run"]["incomplete"] for result in written]
    assert reasons == (["the server has not recovered after 60 s"] if answered else [])
    assert all(result["results"]["outcomes"]["label"][RIGHT] > 0 for result in written)


def test_tables_list_outcomes_and_kills() -> None:
    soaked = results([1.0, 2.0], {RIGHT: 3, WRONG: 1, "503": 2, CUT: 2})
    assert build_table(soaked).rows == [("sentence", "8", "37.50 %", "1", "503: 2, cut: 2")]
    assert build_memory_table(soaked).rows[-1] == ("killed", "gcs 2", "")
    assert soaked.wrong == 1


def test_outcomes_are_counted_by_kind() -> None:
    seen = [Observation(kind, outcome, 0, 1) for kind, outcome in (("b", "503"), ("a", RIGHT))]
    assert count_outcomes(seen) == {"a": {RIGHT: 1}, "b": {"503": 1}}
    with pytest.raises(BenchmarkError):
        count_outcomes([])
