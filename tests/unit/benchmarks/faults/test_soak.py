from __future__ import annotations

from typing import Any

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.faults import soak as soak_module
from benchmarks.faults.load import CUT, RIGHT, WRONG, KnownRequest, Observation, classify_answer
from benchmarks.faults.mixed_load import RATES, is_close, parse_stream
from benchmarks.faults.soak import (
    MemorySample,
    SoakResults,
    build_memory_table,
    build_table,
    count_outcomes,
    evaluate_goals,
    soak,
)
from benchmarks.hostile.wire import HttpExchange
from benchmarks.servers.own_server import Server

WHOLE = (
    b'data: {"choices": [{"text": "Hel"}]}\n\ndata: {"choices": [{"text": "lo"}]}\n\n'
    b'data: {"choices": []}\n\ndata: [DONE]\n\n'
)
FAILED = b'data: {"choices": [{"text": "Hel"}]}\n\ndata: {"error": {}}\n\ndata: [DONE]\n\n'


def results(sizes: list[float], outcomes: dict[str, int] | None = None) -> SoakResults:
    samples = [MemorySample(10.0 * n, size, 5) for n, size in enumerate(sizes)]
    return SoakResults(60.0, {"gcs": 2}, {"sentence": outcomes or {RIGHT: 3}}, samples)


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
    assert results([10, 50, 100, 100, 100, 100, 110, 110]).growth == pytest.approx(0.1)


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
        await soak(CompleteServer(ServerAddress("127.0.0.1", 9), 0), 0.05, [], seed=0)


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
