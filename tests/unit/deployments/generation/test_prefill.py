from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deployments.config import SchedulingSettings
from deployments.generation.prefill import (
    MIN_CHUNK_TOKENS,
    PrefillRate,
    chunk_size,
    extend_first_chunk,
    fits_min_chunk,
    prefill_budget,
)
from tests.support import virtual_time
from tests.support.fake_decoder import FakeDecoder
from tests.support.scheduler_harness import SchedulerHarness
from tests.support.virtual_time import Arrival, TimedDecoder, VirtualScheduler

RULES = SchedulingSettings(
    max_prefill_stall_ms=100, max_prefill_chunk_tokens=256, min_prefill_chunk_tokens=16
)


@pytest.mark.parametrize(
    ("tokens_per_s", "is_decode_idle", "budget"),
    [
        pytest.param(1_000, False, 100, id="what the time allows"),
        pytest.param(50, False, 16, id="the least, however slow"),
        pytest.param(100_000, False, 10_000, id="much on a fast device"),
        pytest.param(1_000, True, 256, id="a chunk while decode is idle"),
        pytest.param(50, True, 100, id="two seconds of it on a slow device"),
        pytest.param(1, True, 16, id="the least while decode is idle"),
    ],
)
def test_prefill_budget_follows_rate_and_stall_limit(
    tokens_per_s: float, is_decode_idle: bool, budget: int
) -> None:
    assert prefill_budget(tokens_per_s, RULES, is_decode_idle=is_decode_idle) == budget


@pytest.mark.parametrize(
    ("unread", "budget", "worth"),
    [
        pytest.param(400, 70, True, id="a part of it"),
        pytest.param(400, 15, False, id="too little of it"),
        pytest.param(5, 5, True, id="the whole of a short one"),
        pytest.param(5, 4, False, id="not the whole of a short one"),
        pytest.param(1, 0, False, id="nothing is left"),
    ],
)
def test_remaining_budget_requires_a_minimum_chunk(unread: int, budget: int, worth: bool) -> None:
    assert fits_min_chunk(unread, budget, RULES) is worth


@pytest.mark.parametrize(
    ("tokens", "done", "remaining", "extended"),
    [
        pytest.param(16, 0, 200, 65, id="too early an end"),
        pytest.param(16, 40, 160, 25, id="too early an end after a chunk"),
        pytest.param(16, 0, 16, 16, id="a whole prompt"),
        pytest.param(16, 0, 66, 66, id="never a single token"),
        pytest.param(70, 0, 200, 70, id="a late end"),
        pytest.param(16, 65, 100, 16, id="a late start"),
    ],
)
def test_first_chunk_is_extended(tokens: int, done: int, remaining: int, extended: int) -> None:
    assert extend_first_chunk(tokens, done, remaining, min_end=65) == extended
    assert extend_first_chunk(tokens, done, remaining, min_end=0) == tokens


@pytest.mark.parametrize(
    ("unread", "most", "part"),
    [(40, 256, 40), (1_500, 256, 256), (1, 100, 1), (101, 100, 99), (257, 256, 255), (3, 2, 3)],
)
def test_chunk_size(unread: int, most: int, part: int) -> None:
    assert chunk_size(unread, most) == part


@pytest.mark.parametrize("most", [2, 3, 7, 16])
@pytest.mark.parametrize("unread", range(2, 60))
def test_chunks_never_have_one_token(unread: int, most: int) -> None:
    parts = []
    while unread:
        parts.append(chunk_size(unread, most))
        unread -= parts[-1]
    assert min(parts) >= MIN_CHUNK_TOKENS
    assert max(parts) <= max(most, 3)


def test_rate_drops_at_once_and_rises_gradually() -> None:
    speed = PrefillRate(1_000)
    speed.update(100, elapsed_s=0.2, min_tokens=16)
    assert speed.tokens_per_s == 500
    speed.update(100, elapsed_s=0.1, min_tokens=16)
    assert speed.tokens_per_s == 625


def test_short_chunk_only_raises_the_rate() -> None:
    speed = PrefillRate(1_000)
    speed.update(15, elapsed_s=10, min_tokens=16)
    assert speed.tokens_per_s == 1_000
    speed.update(15, elapsed_s=0.005, min_tokens=16)
    assert speed.tokens_per_s == 1_500


class EncoderDecoder(FakeDecoder):
    """Decoder whose prompts are encoded as a whole. Its slots contain answers only.

    It replaces the clock of prefills: a token takes 0.1 ms.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.now_s = 0.0
        self.info = replace(self.info, max_source_tokens=self.context)

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Any:
        self.parts.append((slot, len(ids)))
        self.now_s += 1e-4 * len(ids)
        self.memory[slot, 0] = (ids[0], 1)
        return self._logits(slot, 1)

    def perf_counter(self) -> float:
        return self.now_s


@pytest.mark.parametrize("tokens", [20, 8])
def test_encoder_decoder_encodes_several_prompts_per_step(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the first prompt has shown the speed, other prompts do not take a step each."""
    decoder = EncoderDecoder(slots=8)
    monkeypatch.setattr("deployments.generation.prefill.time", decoder)
    harness = SchedulerHarness(decoder, SchedulingSettings())
    for n in range(8):
        if n == 1:
            harness.scheduler.run_step()
        harness.scheduler.submit(harness.job([n] * tokens, new_tokens=60))
    encoded = len(decoder.parts)
    harness.scheduler.run_step()
    assert len(decoder.parts) - encoded == 7


def test_prompts_are_encoded_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = EncoderDecoder(slots=4)
    monkeypatch.setattr("deployments.generation.prefill.time", decoder)
    harness = SchedulerHarness(decoder, SchedulingSettings(min_prefill_chunk_tokens=30))
    for n in range(3):
        if n == 1:
            harness.scheduler.run_step()
            harness.scheduler._executor._prefill_rate.tokens_per_s = 100  # the minimum is more
        harness.scheduler.submit(harness.job([n] * 20, new_tokens=60))
    harness.scheduler.run_step()
    assert len(decoder.parts) == 2, "the third prompt would exceed the budget of 30 tokens"


@pytest.mark.parametrize(
    ("tokens_per_s", "later_chunks"),
    [pytest.param(1_000, {255, 256}, id="normal"), pytest.param(10, {20}, id="slow")],
)
def test_chunks_of_a_lone_prompt_do_not_count_as_hangs(
    monkeypatch: pytest.MonkeyPatch, tokens_per_s: float, later_chunks: set[int]
) -> None:
    """On a normal host, only the first chunk is small. On a slow host, all chunks are small."""
    monkeypatch.setattr(virtual_time, "PREFILL_TOKEN_S", 1 / tokens_per_s)
    virtual = VirtualScheduler(monkeypatch)
    prefill, chunks = TimedDecoder.prefill, []

    def check_health(
        decoder: TimedDecoder, slot: int, ids: Sequence[int], start: int, **how: bool
    ) -> Any:
        chunks.append(len(ids))
        logits = prefill(decoder, slot, ids, start, **how)
        virtual.scheduler.health.check()
        return logits

    monkeypatch.setattr(TimedDecoder, "prefill", check_health)
    (outcome,) = virtual.replay([Arrival(0.0, prompt_tokens=600, new_tokens=4, timeout_s=120.0)])
    assert outcome.error is None
    assert set(chunks[1:-1]) <= later_chunks
