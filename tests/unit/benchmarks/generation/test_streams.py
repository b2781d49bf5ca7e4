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


def test_decoding_is_timed_while_everybody_writes() -> None:
    early = answer([1.0, 2.0, 3.0, 4.0])
    late = answer([2.0, 3.0, 4.0, 5.0])
    # From 2.0, when the last prompt is read, to 4.0, when the first one is done: two tokens each.
    assert StreamGroup((early, late)).decode_tokens_per_s == 2.0
    assert StreamGroup((early,)).decode_tokens_per_s == 1.0


def test_streams_that_never_write_together_have_no_such_rate() -> None:
    assert StreamGroup((answer([1.0, 2.0]), answer([3.0, 4.0]))).decode_tokens_per_s is None


def test_events_are_no_tokens() -> None:
    event_times = StreamResult(
        submitted_s=0.0, arrivals_s=(1.0, 2.0), tokens=7, text="seven tokens"
    )
    assert StreamGroup((event_times,)).decode_tokens_per_s is None
    assert StreamGroup((event_times,)).tokens_per_s == 3.5


def test_waits_are_told_in_milliseconds() -> None:
    quick, slow = answer([0.5, 0.6, 0.7]), answer([1.5, 1.6, 2.0], submitted_s=0.5)
    figures = StreamGroup((quick, slow)).metrics
    assert figures[THROUGHPUT] == 3.0
    assert figures[TTFT] == pytest.approx(750.0)
    assert figures[TTFT_MAX] == pytest.approx(1_000.0)
    assert figures[INTER_TOKEN] == pytest.approx(100.0)
    assert figures[INTER_TOKEN_MAX] == pytest.approx(400.0)


def test_a_single_token_has_no_gap() -> None:
    assert set(StreamGroup((answer([1.0]),)).metrics) == {THROUGHPUT, TTFT, TTFT_MAX}


async def test_readers_take_questions_in_turn_and_answers_keep_their_order() -> None:
    generator = ScriptedText(lambda request: request.prompt)
    requests = [StreamRequest((number, number), 2) for number in range(9)]
    answers = await run_streams(generator, requests, clients=3)
    assert [found.ids for found in answers] == [request.prompt for request in requests]
    assert generator.most_at_once == 3


async def test_without_a_number_of_readers_all_are_asked_at_once() -> None:
    generator = ScriptedText()
    await run_streams(generator, [StreamRequest((1,), 3)] * 5)
    assert generator.most_at_once == 5


async def test_a_failure_ends_the_rest() -> None:
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
