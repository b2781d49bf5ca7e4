"""Outcomes of a micro-batch: a long decode holds back no other call."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import pytest

from deployments.messages import CallOutcome, CallResult
from deployments.replicas.encoder import DECODE_THREADS
from deployments.replicas.encoder_calls import INLINE_DECODE_S
from deployments.tasks import DecodeContext
from deployments.tasks.embedding import FeatureExtraction
from tests.support.artifacts import WIDTH
from tests.support.encoder_harness import EncoderHarness, call, replace_task
from tests.support.fakes import TIMEOUT_S, wait_until


class SlowTask(FeatureExtraction):
    """A task that decodes calls of several items in a thread, which waits for `held`."""

    def __init__(self, *, unpooled: bool = False) -> None:
        super().__init__()
        self.unpooled = unpooled  # type: ignore[misc]
        self.held = threading.Event()
        self.begun: list[int] = []  # items of each call
        self.decoded: list[int] = []

    def predict_decode_s(self, context: DecodeContext, options: Any) -> float:
        return 2 * INLINE_DECODE_S if len(context.items) > 1 else 0.0

    def decode(self, context: DecodeContext, options: Any) -> Any:
        if len(context.items) > 1:
            self.begun.append(len(context.items))
            assert self.held.wait(TIMEOUT_S)
        self.decoded.append(len(context.items))
        return len(context.rows)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> SlowTask:
    task = SlowTask()
    replace_task(monkeypatch, task)
    return task


async def test_long_decode_holds_back_no_other_call(
    encoder: EncoderHarness, task: SlowTask
) -> None:
    batch = encoder.batch(call(2), call(2, 2), call(2), call(2, 2))
    async with aclosing(encoder.replica.stream(batch)) as parts:
        first: dict[int, CallOutcome] = {}
        while len(first) < 2:  # of one pass or of two
            first |= await asyncio.wait_for(anext(parts), TIMEOUT_S)
        assert set(first) == {0, 2}
        task.held.set()
        rest = [part async for part in parts]
    outcomes = first | rest[0] | rest[-1]
    assert set(outcomes) == {0, 1, 2, 3}
    assert all(isinstance(outcome, CallResult) for outcome in outcomes.values())
    assert {outcome.timings.tokenize_s for outcome in outcomes.values()} == {batch.tokenize_s}


async def test_calls_decode_in_several_threads(encoder: EncoderHarness, task: SlowTask) -> None:
    """One long decode does not hold back the others either."""
    held, decode = threading.Event(), task.decode

    def decode_first_late(context: DecodeContext, options: Any) -> Any:
        if len(context.items) == 2:
            assert held.wait(TIMEOUT_S)
        return decode(context, options)

    task.decode = decode_first_late  # type: ignore[method-assign]
    task.held.set()
    async with aclosing(encoder.replica.stream(encoder.batch(call(2, 2), call(2, 2, 2)))) as parts:
        assert set(await asyncio.wait_for(anext(parts), TIMEOUT_S)) == {1}
        held.set()
        assert set(await anext(parts)) == {0}


async def test_outputs_count_until_no_thread_reads_them(
    encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the stream drops decodes that have no thread yet, and cannot stop running ones."""
    task = SlowTask(unpooled=True)
    replace_task(monkeypatch, task)
    used = encoder.replica._output_values
    stream = encoder.replica.stream(encoder.batch(*[call(2, 2)] * (DECODE_THREADS + 2)))
    reading = asyncio.create_task(anext(stream))
    await wait_until(lambda: len(task.begun) == DECODE_THREADS)
    assert used.used == (DECODE_THREADS + 2) * 4 * WIDTH
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await stream.aclose()
    assert used.used == DECODE_THREADS * 4 * WIDTH, "threads still read these outputs"
    task.held.set()
    await wait_until(lambda: used.used == 0)
    assert len(task.decoded) == DECODE_THREADS
