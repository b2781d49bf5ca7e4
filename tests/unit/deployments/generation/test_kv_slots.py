from __future__ import annotations

import random

import pytest

from deployments.generation.kv_slots import MIN_PREFIX_TOKENS, CopySlot, SlotTable, SwapSlots
from deployments.generation.prefill import MIN_CHUNK_TOKENS

SYSTEM = list(range(100, 140))  # shared prompt prefix


def read_whole(
    slots: SlotTable, owner: int, prompt: list[int]
) -> tuple[int, list[CopySlot | SwapSlots]]:
    """Assign a slot and prefill the prompt. Return the cached length and the moves."""
    slot = slots.acquire(owner)
    shared, moves = slots.start_prompt(slot, prompt)
    slots.append_prompt(slot, prompt[shared:])
    return shared, moves


def test_used_slots_come_first() -> None:
    slots = SlotTable(3)
    assert [slots.acquire(owner) for owner in (7, 8)] == [0, 1]
    assert (slots.used_slots, slots.free_slots) == (2, 1)


def test_released_slot_is_filled_by_the_last() -> None:
    slots = SlotTable(3)
    for owner, tokens in ((7, 20), (8, 30), (9, 40)):
        read_whole(slots, owner, [owner] * tokens)
    slots.append_token(2)
    assert slots.release(7) == [SwapSlots(0, 2, 41)]
    assert (slots.slot_of(9), slots.slot_of(8), slots.used_slots) == (0, 1, 2)
    assert slots.used_tokens(0) == 41


def test_release_of_the_last_slot_moves_nothing() -> None:
    slots = SlotTable(2)
    slots.acquire(7)
    slots.acquire(8)
    assert slots.release(8) == []


def test_transfer_keeps_the_slot() -> None:
    slots = SlotTable(2)
    slots.acquire(7)
    slots.acquire(8)
    slots.transfer(7, 9)
    assert (slots.slot_of(9), slots.slot_of(8), slots.free_slots) == (0, 1, 0)


def test_transfer_drops_the_answer() -> None:
    slots = SlotTable(2)
    read_whole(slots, 7, SYSTEM)
    for _ in range(3):
        slots.append_token(0)
    slots.transfer(7, 8)
    assert slots.used_tokens(0) == len(SYSTEM)


def test_prefix_of_a_used_slot_is_copied() -> None:
    slots = SlotTable(3)
    read_whole(slots, 1, [*SYSTEM, 1, 2, 3])
    shared, moves = read_whole(slots, 2, [*SYSTEM, 4, 5, 6])
    assert (shared, moves) == (len(SYSTEM), [CopySlot(0, 1, len(SYSTEM))])


def test_prefix_of_the_same_slot_is_reused() -> None:
    slots = SlotTable(2)
    read_whole(slots, 1, SYSTEM)
    slots.release(1)
    assert read_whole(slots, 2, [*SYSTEM, 4, 5]) == (len(SYSTEM), [])


@pytest.mark.parametrize("tokens", [5, 20])
def test_prefix_of_a_free_slot_is_swapped_in(tokens: int) -> None:
    slots = SlotTable(3)
    read_whole(slots, 1, [1] * tokens)
    read_whole(slots, 2, SYSTEM)
    slots.release(2)
    slots.release(1)
    shared, moves = read_whole(slots, 3, [*SYSTEM, 4, 5])
    assert (shared, moves) == (len(SYSTEM), [SwapSlots(1, 0, len(SYSTEM))])
    assert isinstance(moves[0], SwapSlots), "an equal CopySlot would keep the prefix twice"


def test_prefix_survives_other_requests() -> None:
    slots = SlotTable(3)
    for owner, prompt in ((1, SYSTEM), (2, [2] * 30), (3, [3] * 30)):
        read_whole(slots, owner, prompt)
        slots.release(owner)
    assert read_whole(slots, 4, [*SYSTEM, 4, 5])[0] == len(SYSTEM)


def test_least_recently_used_prefix_is_evicted() -> None:
    slots = SlotTable(2)
    for owner in (1, 2, 3):
        read_whole(slots, owner, [owner] * 30)
        slots.release(owner)
    assert read_whole(slots, 4, [1] * 40)[0] == 0
    slots.release(4)
    assert read_whole(slots, 5, [3] * 40)[0] == 30


def test_new_prompt_does_not_evict_a_more_recently_used_one() -> None:
    slots = SlotTable(2)
    for owner in (1, 2):
        read_whole(slots, owner, [owner] * 30)
    slots.release(2)
    slots.release(1)
    assert read_whole(slots, 3, [3] * 30) == (0, []), "the prompt of slot 0 is the oldest"
    slots.release(3)
    assert read_whole(slots, 4, [2] * 40)[0] == 30


def test_longer_prompt_with_the_same_start_is_kept() -> None:
    slots = SlotTable(3)
    first, second = [*SYSTEM, *[1] * 50], [*SYSTEM, *[2] * 50]
    read_whole(slots, 1, first)
    slots.release(1)
    # The first prompt is copied to slot 1. The second prompt continues from SYSTEM in slot 0.
    assert read_whole(slots, 2, second) == (len(SYSTEM), [CopySlot(0, 1, len(first))])
    slots.release(2)
    # The second prompt is swapped out of slot 0, and nothing is lost.
    assert read_whole(slots, 3, [*first, 1]) == (len(first) - 1, [SwapSlots(1, 0, len(first))])
    slots.release(3)
    assert read_whole(slots, 4, [*second, 2])[0] == len(second) - 1


def test_longer_prompt_in_a_free_slot_is_copied_not_taken() -> None:
    slots = SlotTable(3)
    read_whole(slots, 1, [9] * 30)
    read_whole(slots, 2, [*SYSTEM, *[2] * 50])
    slots.release(2)
    slots.release(1)
    _, moves = read_whole(slots, 3, [*SYSTEM, *[3] * 50])
    assert moves == [CopySlot(0, 2, 30), CopySlot(1, 0, len(SYSTEM))]


@pytest.mark.parametrize("conversations", [2, 8])
def test_conversations_in_turn_keep_their_prefixes(conversations: int) -> None:
    """Each turn extends the prompt of the turn before. All begin with the same template."""
    slots = SlotTable(8)
    prompts = [[*range(24), *[100 + number] * 30] for number in range(conversations)]
    for turn in range(5):
        for number, prompt in enumerate(prompts):
            cached, _ = read_whole(slots, number, prompt)
            slots.release(number)
            if turn:
                assert cached == len(prompt) - 50
            prompt += [1_000 * turn + number] * 50


def test_generated_tokens_are_not_cached() -> None:
    slots = SlotTable(2)
    read_whole(slots, 1, SYSTEM)
    for _ in range(5):
        slots.append_token(0)
    assert slots.used_tokens(0) == len(SYSTEM) + 5
    slots.release(1)
    assert slots.used_tokens(0) == len(SYSTEM)


@pytest.mark.parametrize(
    ("before", "prompt", "shared"),
    [
        (SYSTEM, SYSTEM, len(SYSTEM) - MIN_CHUNK_TOKENS),
        (SYSTEM, SYSTEM[: MIN_PREFIX_TOKENS - 1] + [0] * 9, 0),
        (SYSTEM, SYSTEM[:MIN_PREFIX_TOKENS] + [0] * 9, MIN_PREFIX_TOKENS),
        (SYSTEM, [0, *SYSTEM], 0),
        (SYSTEM, [5], 0),
        (SYSTEM[:MIN_PREFIX_TOKENS], SYSTEM, MIN_PREFIX_TOKENS),
    ],
)
def test_cached_prefix_length(before: list[int], prompt: list[int], shared: int) -> None:
    slots = SlotTable(2)
    read_whole(slots, 1, before)
    assert read_whole(slots, 2, prompt)[0] == shared


def test_skip_prefix_cache_reuses_nothing() -> None:
    slots = SlotTable(2)
    read_whole(slots, 1, SYSTEM)
    slots.acquire(2)
    assert slots.start_prompt(1, SYSTEM, skip_prefix_cache=True) == (0, [])


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_keep_slots_unique(seed: int) -> None:
    """Apply the moves of random requests to a list of slots; every job must keep its tokens."""
    chance = random.Random(seed)
    slots, memory = SlotTable(4), [[] for _ in range(4)]
    prompts: dict[int, list[int]] = {}
    prefixes = [[b] * chance.randint(1, 40) for b in range(6)]

    def carry_out(moves: list[CopySlot | SwapSlots]) -> None:
        for move in moves:
            if isinstance(move, CopySlot):
                memory[move.target][: move.tokens] = memory[move.source][: move.tokens]
            else:
                one, two = memory[move.first], memory[move.second]
                copied = one[: move.tokens]
                memory[move.first] = two[: move.tokens] + one[move.tokens :]
                memory[move.second] = copied + two[move.tokens :]

    for owner in range(200):
        if slots.free_slots and chance.random() < 0.6:
            prompt = [*chance.choice(prefixes), *[owner] * chance.randint(2, 30)]
            prefixes[chance.randrange(len(prefixes))] = prompt  # later prompts may extend this one
            slot = slots.acquire(owner)
            shared, moves = slots.start_prompt(slot, prompt)
            assert len(moves) <= 2
            carry_out(moves)
            memory[slot][shared:] = prompt[shared:]
            slots.append_prompt(slot, prompt[shared:])
            prompts[owner] = prompt
        elif prompts:
            left = chance.choice(list(prompts))
            del prompts[left]
            carry_out(slots.release(left))
        taken = [slots.slot_of(one) for one in prompts]
        assert sorted(taken) == list(range(len(prompts)))
        assert slots.free_slots + len(prompts) == 4
        for one, prompt in prompts.items():
            assert memory[slots.slot_of(one)][: len(prompt)] == prompt


def test_prefix_of_another_scope_is_not_found() -> None:
    slots = SlotTable(3)
    for owner, scope, cached in ((1, "alice", 0), (2, "bob", 0), (3, "alice", 40)):
        slot = slots.acquire(owner)
        shared, _ = slots.start_prompt(slot, [*SYSTEM, owner, owner], scope)
        assert shared == cached
        slots.append_prompt(slot, [*SYSTEM, owner, owner][shared:])


def test_saved_prefix_keeps_its_scope() -> None:
    slots = SlotTable(2)
    slots.acquire(1)
    slots.start_prompt(0, SYSTEM, "alice")
    slots.append_prompt(0, SYSTEM)
    slots.release(1)
    slots.acquire(2)
    # Alice's cached prompt moves to the free slot. Then Bob's prompt overwrites slot 0.
    assert slots.start_prompt(0, [*SYSTEM, 1, 2], "bob")[0] == 0
    slots.release(2)
    slots.acquire(3)
    assert slots.start_prompt(0, [*SYSTEM, 1, 2], "bob")[0] == 0
    slots.release(3)
    slots.acquire(4)
    assert slots.start_prompt(0, [*SYSTEM, 1, 2], "alice")[0] == len(SYSTEM)
