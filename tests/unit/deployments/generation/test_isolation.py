"""Whose fault a failure is: only a broken engine quarantines a model, no prompt of a client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deployments.config import SchedulingSettings
from deployments.errors import EngineFailed, EngineLost, ModelUnavailable
from deployments.health import MAX_CONSECUTIVE_FAILURES
from deployments.messages import GenerationOptions
from tests.support.fake_decoder import VOCABULARY, FakeDecoder, RecurrentFakeDecoder
from tests.support.fakes import PanicException
from tests.support.scheduler_harness import END, GREEDY, SchedulerHarness

POISON = 50
HOWS = ["prefill raises", "prefill is NaN", "decode raises", "decode is NaN"]
KINDS = [FakeDecoder, RecurrentFakeDecoder]


def spoil(kind: type[FakeDecoder], how: str, *, poison: int | None) -> type[FakeDecoder]:
    """Return a class of decoders whose calls fail if a slot contains `poison`, or all if None."""
    call, result = how.split(" ", 1)

    class Spoilt(kind):  # type: ignore[misc,valid-type]
        is_repaired = False

        def prefill(self, slot, ids, start, *, all_logits=False):
            logits = super().prefill(slot, ids, start, all_logits=all_logits)
            return self._spoil(logits, [slot], [start + len(ids)]) if call == "prefill" else logits

        def decode(self, ids, lengths):
            logits = super().decode(ids, lengths)
            if call != "decode":
                return logits
            rows = [self._spoil(row, [n], lengths[n : n + 1]) for n, row in enumerate(logits)]
            return np.stack(rows)

        def _spoil(self, logits, slots, lengths):
            held = [self.memory[n, :used, 0] for n, used in zip(slots, lengths, strict=True)]
            is_good = poison is not None and poison not in np.concatenate(held)
            if self.is_repaired or is_good:
                return logits
            if result == "raises":
                raise EngineFailed("an illegal access")
            return np.full_like(logits, np.nan)

    return Spoilt


def run_alone(harness: SchedulerHarness, prompt: list[int], **how: Any) -> Any:
    """Run one job alone, step by step. Return its last event."""
    job = harness.job(prompt, new_tokens=4, **how)
    harness.scheduler.submit(job)
    while harness.scheduler.slot_use != (0, 0):
        harness.scheduler.run_step()
    return harness.collector.events[job.number][-1]


def is_quarantined(harness: SchedulerHarness) -> bool:
    try:
        harness.scheduler.health.check_quarantine()
    except ModelUnavailable:
        return True
    return False


@pytest.mark.usefixtures("long_quarantine")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_one_client_quarantine_no_model(kind: type[FakeDecoder], how: str) -> None:
    harness = SchedulerHarness(spoil(kind, how, poison=POISON)(), SchedulingSettings())
    for n in range(2 * MAX_CONSECUTIVE_FAILURES):
        assert isinstance(run_alone(harness, [POISON, n, 5]), EngineFailed)
    assert not is_quarantined(harness)
    sound = SchedulerHarness(kind(), SchedulingSettings())
    assert run_alone(harness, [1, 2, 3]).tokens == run_alone(sound, [1, 2, 3]).tokens


@pytest.mark.usefixtures("long_quarantine")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_broken_engine_is_quarantined_and_probed(
    kind: type[FakeDecoder], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = spoil(kind, how, poison=None)()
    harness = SchedulerHarness(decoder, SchedulingSettings())
    for n in range(MAX_CONSECUTIVE_FAILURES):
        assert not is_quarantined(harness)
        assert isinstance(run_alone(harness, [n, n + 1, 5]), EngineFailed)
    assert is_quarantined(harness)
    health = harness.scheduler.health
    monkeypatch.setattr(health, "_probe_s", 0.0)
    assert isinstance(run_alone(harness, [1, 2, 5]), EngineFailed)
    assert health.failed_probes == 1
    assert is_quarantined(harness)
    decoder.is_repaired = True
    monkeypatch.setattr(health, "_probe_s", 0.0)
    assert run_alone(harness, [1, 2, 5]).finished is not None
    assert not health.is_failing


@pytest.mark.parametrize("how", HOWS)
def test_bad_prompt_as_a_probe_ends_the_quarantine(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = SchedulerHarness(spoil(FakeDecoder, how, poison=POISON)(), SchedulingSettings())
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        harness.scheduler.health.record_failure()
    monkeypatch.setattr(harness.scheduler.health, "_probe_s", 0.0)
    assert isinstance(run_alone(harness, [POISON, 2, 5]), EngineFailed)
    assert not harness.scheduler.health.is_failing


class Panicking:
    """A grammar that panics with the answer's first token, or later."""

    is_complete = False

    def __init__(self, after: int) -> None:
        self._left = after

    def compute_allowed(self) -> Any:
        self._left -= 1
        if self._left < 0:
            raise PanicException("index out of bounds")
        return np.arange(VOCABULARY) != END

    def accept(self, token: int) -> None:
        """Accept every token."""


@pytest.mark.usefixtures("long_quarantine")
@pytest.mark.parametrize("after", [0, 2])
def test_panics_of_grammars_are_no_failures_of_the_engine(after: int) -> None:
    harness = SchedulerHarness(FakeDecoder(), SchedulingSettings())
    for n in range(2 * MAX_CONSECUTIVE_FAILURES):
        last = run_alone(harness, [n, 2, 5], constraint=Panicking(after))
        assert isinstance(last, EngineFailed)
    assert not is_quarantined(harness)


def test_panic_of_a_tokenizer_ends_its_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = SchedulerHarness(FakeDecoder(), SchedulingSettings())
    options = GenerationOptions(sampling=GREEDY, max_new_tokens=4, prompt_logprobs=True)
    job = harness.job([1, 2, 5], options=options)

    def panic(_token: int) -> str:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(job._detokenizer, "push", panic)
    harness.scheduler.submit(job)
    harness.scheduler.run_step()
    assert isinstance(harness.collector.events[job.number][-1], EngineFailed)
    assert not harness.scheduler.health.is_failing


@pytest.mark.parametrize("kind", KINDS)
def test_tests_of_the_engine_change_no_answer(kind: type[FakeDecoder]) -> None:
    """The test of a failed answer runs while the slots of other prompts are half filled."""
    settings = SchedulingSettings(max_prefill_chunk_tokens=16, min_prefill_chunk_tokens=4)
    prompts = [[*range(40)], [POISON, 2, 5], [*range(3, 40)]]

    def run(decoder: FakeDecoder, numbers: list[int]) -> dict[int, list[int]]:
        harness = SchedulerHarness(decoder, settings)
        jobs = {number: harness.job(prompts[number], new_tokens=12) for number in numbers}
        for job in jobs.values():
            harness.scheduler.submit(job)
        while harness.scheduler.slot_use != (0, 0):
            harness.scheduler.run_step()
        return {number: harness.collector.tokens(job) for number, job in jobs.items()}

    spoilt = spoil(kind, "decode is NaN", poison=POISON)
    together = run(spoilt(), [0, 1, 2])
    for number in (0, 2):
        assert together[number] == run(kind(), [number])[number]


def test_lost_engine_needs_no_test() -> None:
    class LostAtOnce(FakeDecoder):
        def prefill(self, slot, ids, start, *, all_logits=False):
            self.parts.append((slot, len(ids)))
            raise EngineLost("all processes have ended")

    harness = SchedulerHarness(LostAtOnce(), SchedulingSettings())
    assert isinstance(run_alone(harness, [1, 2, 5]), EngineLost)
    assert harness.decoder.parts == [(0, 3)]
    with pytest.raises(EngineLost):
        harness.scheduler.health.check()
