from __future__ import annotations

import asyncio

import pytest

from benchmarks.generation.streams import (
    INTER_TOKEN,
    INTER_TOKEN_MAX,
    THROUGHPUT,
    TTFT,
    TTFT_MAX,
    StreamGroup,
    StreamRequest,
    StreamResult,
    run_streams,
)
from deployments.errors import EngineFailed
from tests.support.benchmark_generation import ScriptedText, answer


def test_decode_rate_covers_the_overlap_of_all_streams() -> None:
    early = answer([1.0, 2.0, 3.0, 4.0])
    late = answer([2.0, 3.0, 4.0, 5.0])
    # All streams overlap from 2.0 s (the latest first token) to 4.0 s (the earliest end). Each has
    # two tokens in these 2 s.
    assert StreamGroup((early, late)).decode_tokens_per_s == 2.0
    assert StreamGroup((early,)).decode_tokens_per_s == 1.0


def test_decode_rate_without_overlap_is_none() -> None:
    assert StreamGroup((answer([1.0, 2.0]), answer([3.0, 4.0]))).decode_tokens_per_s is None


def test_decode_rate_without_token_ids_is_none() -> None:
    event_times = StreamResult(
        submitted_s=0.0, arrivals_s=(1.0, 2.0), tokens=7, text="seven tokens"
    )
    assert StreamGroup((event_times,)).decode_tokens_per_s is None
    assert StreamGroup((event_times,)).tokens_per_s == 3.5


def test_metrics_are_in_milliseconds() -> None:
    quick, slow = answer([0.5, 0.6, 0.7]), answer([1.5, 1.6, 2.0], submitted_s=0.5)
    metrics = StreamGroup((quick, slow)).metrics
    assert metrics[THROUGHPUT] == 3.0
    assert metrics[TTFT] == pytest.approx(750.0)
    assert metrics[TTFT_MAX] == pytest.approx(1_000.0)
    assert metrics[INTER_TOKEN] == pytest.approx(100.0)
    assert metrics[INTER_TOKEN_MAX] == pytest.approx(400.0)


def test_metrics_of_one_token_have_no_inter_token_time() -> None:
    assert set(StreamGroup((answer([1.0]),)).metrics) == {THROUGHPUT, TTFT, TTFT_MAX}


async def test_run_streams_keeps_the_order_of_answers() -> None:
    generator = ScriptedText(lambda request: request.prompt)
    requests = [StreamRequest((number, number), 2) for number in range(9)]
    answers = await run_streams(generator, requests, clients=3)
    assert [answer.ids for answer in answers] == [request.prompt for request in requests]
    assert generator.max_concurrent == 3


async def test_run_streams_without_clients_runs_all_at_once() -> None:
    generator = ScriptedText()
    await run_streams(generator, [StreamRequest((1,), 3)] * 5)
    assert generator.max_concurrent == 5


async def test_run_streams_failure_cancels_the_other_streams() -> None:
    ended = []

    class Failing:
        async def generate(self, request: StreamRequest) -> StreamResult:
            if request.prompt == (13,):
                raise EngineFailed("bad luck")
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(request.prompt)
            raise AssertionError

    with pytest.raises(EngineFailed, match="bad luck"):
        await run_streams(
            Failing(), [StreamRequest((1,), 1), StreamRequest((13,), 1), StreamRequest((2,), 1)]
        )
    assert sorted(ended) == [(1,), (2,)]
