"""Scheduling of decoders with recurrent states, whose calls cannot be repeated or ignored."""

from __future__ import annotations

import random

import pytest

from deployments.engines.decoder import Logits
from deployments.errors import EngineFailed
from deployments.generation.kv_slots import MIN_SHARED_TOKENS, CopySlot, SlotTable
from deployments.generation.prefill import (
    LAST_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    resumable_chunk_size,
)
from deployments.messages import GenerationOptions
from tests.support.fake_decoder import RecurrentFakeDecoder
from tests.support.scheduler_harness import GREEDY, SYSTEM

ENDLESS = GenerationOptions(sampling=GREEDY, min_new_tokens=40, max_new_tokens=40)


@pytest.mark.parametrize(
    ("remaining", "most", "size"),
    [(100, 256, 84), (300, 256, 256), (16, 256, 16), (17, 256, 17), (18, 256, 2), (5, 4, 3)],
)
def test_last_chunk_is_short(remaining: int, most: int, size: int) -> None:
    assert resumable_chunk_size(remaining, most) == size


@pytest.mark.parametrize("most", [4, 16, 64])
def test_chunks_have_no_single_token(most: int) -> None:
    for prompt in range(2, 200):
        remaining, sizes = prompt, []
        while remaining:
            sizes.append(resumable_chunk_size(remaining, most))
            remaining -= sizes[-1]
        assert min(sizes) >= MIN_CHUNK_TOKENS
        assert sizes[-1] <= LAST_CHUNK_TOKENS + 1


def test_next_turn_continues_at_the_last_chunk(make_harness) -> None:
    """The prompts of the two turns differ in their last tokens, as with a generation prompt."""
    harness = make_harness(RecurrentFakeDecoder(), max_prefill_chunk_tokens=64)
    turn = harness.job([*SYSTEM, 1, 2, 3])
    (answer,) = harness.run_jobs(turn)
    prompt = [*SYSTEM, 1, *answer, 4, 5, 6]
    next_turn = harness.job(prompt)
    answers = harness.run_jobs(next_turn)
    started = harness.collector.started(next_turn)
    assert started.cached_tokens == len(SYSTEM) + 3 - LAST_CHUNK_TOKENS
    alone = make_harness(RecurrentFakeDecoder())
    assert answers == alone.run_jobs(alone.job(prompt))


def test_short_last_chunk_needs_no_step_of_its_own(make_harness) -> None:
    """A decode step of all other jobs would delay the first token."""
    decoder = RecurrentFakeDecoder()
    harness = make_harness(decoder, max_prefill_chunk_tokens=64, min_prefill_chunk_tokens=64)
    harness.run_together(harness.job([1, 2, 5], options=ENDLESS), harness.job(SYSTEM))
    chunks = [tokens for slot, tokens in decoder.parts if slot == 1]
    assert chunks == [len(SYSTEM) - LAST_CHUNK_TOKENS, LAST_CHUNK_TOKENS]
    assert [step.prompt_tokens for step in harness.steps.records if step.prompt_tokens][1:] == [
        len(SYSTEM)
    ]


def test_a_conversation_keeps_the_prefixes_of_others() -> None:
    slots = SlotTable(4, is_recurrent=True)
    prompts = {owner: [owner] * 64 for owner in range(4)}

    def take_turn(owner: int) -> int:
        prompt = prompts[owner]
        slot = slots.acquire(owner)
        cached, _ = slots.start_prompt(slot, prompt)
        slots.append_prompt(slot, prompt[cached:-LAST_CHUNK_TOKENS])
        slots.append_prompt(slot, prompt[-LAST_CHUNK_TOKENS:])
        slots.release(owner)
        prompts[owner] = [*prompt, *range(50, 70)]
        return cached

    assert [take_turn(owner) for owner in range(4)] == [0, 0, 0, 0]
    assert all(take_turn(0) for _ in range(4))
    assert [take_turn(owner) for owner in (1, 2, 3)] == [64 - LAST_CHUNK_TOKENS] * 3


def test_prefix_that_ends_before_the_last_chunk_is_not_cached() -> None:
    slots = SlotTable(2, is_recurrent=True)
    slots.acquire(1)
    slots.start_prompt(0, SYSTEM)
    slots.append_prompt(0, SYSTEM[:20])
    slots.append_prompt(0, SYSTEM[20:])
    slots.acquire(2)
    assert slots.start_prompt(1, [*SYSTEM[:19], *range(60)]) == (0, [])
    assert slots.start_prompt(1, [*SYSTEM[:21], *range(60)])[0] == 20


def test_prompts_with_the_same_start_share_it(make_harness) -> None:
    """The second prompt stores the shared start, and the later ones continue from it."""
    system = [n % 60 for n in range(MIN_SHARED_TOKENS)]
    prompts = [[*system, *([60 + n] * 25), 5, 6] for n in range(3)]
    prompts.append([*system[:-1], 61, 62, *range(30)])
    harness = make_harness(RecurrentFakeDecoder(context=120))
    jobs = [harness.job(prompt) for prompt in prompts]
    answers = [harness.run_jobs(job)[0] for job in jobs]
    cached = [harness.collector.started(job).cached_tokens for job in jobs]
    # The last prompt continues at the last chunk of the shared start.
    assert cached == [0, 0, len(system), len(system) - 16]
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = make_harness(RecurrentFakeDecoder(context=120))
        assert alone.run_jobs(alone.job(prompt)) == [answer]


@pytest.mark.parametrize("free_slots", [0, 1, 2])
def test_shared_start_is_stored_in_the_least_recently_used_slot(free_slots: int) -> None:
    slots, system = SlotTable(2 + free_slots, is_recurrent=True), list(range(200))
    for owner in range(free_slots):  # prompts that end and stay cached
        read(slots, owner, [owner] * 30)
        assert slots.release(owner) == []
    read(slots, 10, [*system, *[10] * 40])
    assert slots.shared_tokens_left(slots.slot_of(10)) == 0
    slot = slots.acquire(11)
    assert slots.start_prompt(slot, [*system, *[11] * 40])[0] == 0
    assert slots.shared_tokens_left(slot) == len(system)
    slots.append_prompt(slot, system[:100])
    assert slots.shared_tokens_left(slot) == len(system) - 100
    assert slots.store_shared_prefix(slot) == []
    slots.append_prompt(slot, system[100:])
    moves = slots.store_shared_prefix(slot)
    slots.append_prompt(slot, [11] * 40)
    assert len(moves) == min(free_slots, 1)
    assert all(isinstance(move, CopySlot) and move.tokens == len(system) for move in moves)
    assert slots.release(10) + slots.release(11)
    # Without a free slot, the prompt continues at the last chunk of the second one.
    slot = slots.acquire(12)
    assert slots.start_prompt(slot, [*system, *[12] * 40])[0] == len(system)


def test_stored_start_stays_while_prompts_continue_from_it() -> None:
    slots, system = SlotTable(3, is_recurrent=True), list(range(200))
    read(slots, 0, [*system, *[9] * 40])
    slots.release(0)
    for owner in range(1, 6):
        slot = slots.acquire(owner)
        cached, _ = slots.start_prompt(slot, [*system, *[owner] * 40])
        assert cached == (0 if owner == 1 else len(system))
        slots.append_prompt(slot, system[cached:])
        slots.store_shared_prefix(slot)
        for _ in range(2):
            slots.append_prompt(slot, [owner] * 20)
        slots.release(owner)


def read(slots: SlotTable, owner: int, prompt: list[int]) -> None:
    """Prefill a prompt in one chunk."""
    slot = slots.acquire(owner)
    slots.start_prompt(slot, prompt)
    slots.append_prompt(slot, prompt)


def test_failed_step_ends_all_jobs(make_harness) -> None:
    # The prompts of two jobs fit into one step, however slow the decoder is.
    harness = make_harness(RecurrentFakeDecoder(failing_decode=3), min_prefill_chunk_tokens=16)
    jobs = [harness.job([n, n + 1, 5], options=ENDLESS) for n in range(3)]
    harness.run_together(*jobs)
    for job in jobs:
        assert isinstance(harness.collector.events[job.number][-1], EngineFailed)
    # The last call tests the engine.
    assert harness.decoder.decodes == [1, 3, 3, 1], "the failed step was repeated"
    sound = make_harness(RecurrentFakeDecoder())
    assert harness.run_jobs(harness.job([1, 2, 5])) == sound.run_jobs(sound.job([1, 2, 5]))


def test_prompt_of_a_failed_prefill_is_not_continued(make_harness) -> None:
    class FailsOnce(RecurrentFakeDecoder):
        fails = True

        def prefill(self, slot, ids, start, *, all_logits=False) -> Logits:
            logits = super().prefill(slot, ids, start, all_logits=all_logits)
            if self.fails and start >= 32:
                self.fails = False
                raise EngineFailed("no memory")
            return logits

    harness, prompt = make_harness(FailsOnce()), [*SYSTEM, *SYSTEM]
    failed = harness.job(prompt)
    harness.run_jobs(failed)
    assert isinstance(harness.collector.events[failed.number][-1], EngineFailed)
    again = harness.job(prompt)
    answers = harness.run_jobs(again)
    assert harness.collector.started(again).cached_tokens == 0
    sound = make_harness(RecurrentFakeDecoder())
    assert answers == sound.run_jobs(sound.job(prompt))


@pytest.mark.parametrize("seed", range(10))
def test_moved_slots_are_the_last(seed: int) -> None:
    chance = random.Random(seed)
    slots, owners = SlotTable(8, is_recurrent=True), list(range(chance.randint(1, 8)))
    for owner in owners:
        prompt = [owner] * 30
        slot = slots.acquire(owner)
        slots.start_prompt(slot, prompt)
        slots.append_prompt(slot, prompt)
    contents = [slots.owner_of(slot) for slot in range(len(owners))]
    last = chance.sample(owners, chance.randint(0, len(owners)))
    for move in slots.move_last(last):
        contents[move.first], contents[move.second] = contents[move.second], contents[move.first]
    assert contents == [slots.owner_of(slot) for slot in range(len(owners))]
    assert {*contents[len(owners) - len(last) :]} == {*last}
    assert slots.move_last(last) == []
