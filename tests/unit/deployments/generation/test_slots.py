from __future__ import annotations

import random

import pytest

from deployments.generation.slots import (
    MIN_CHUNK_TOKENS,
    MIN_PREFIX_TOKENS,
    CopySlot,
    SlotTable,
    SwapSlots,
)

SYSTEM = list(range(100, 140))  # shared prompt prefix


def read_whole(
    rows: SlotTable, owner: int, prompt: list[int]
) -> tuple[int, list[CopySlot | SwapSlots]]:
    """Assign a slot and prefill the prompt. Return the cached length and the moves."""
    row = rows.acquire(owner)
    shared, moves = rows.start_prompt(row, prompt)
    rows.append_prompt(row, prompt[shared:])
    return shared, moves


def test_used_slots_come_first() -> None:
    rows = SlotTable(3)
    assert [rows.acquire(owner) for owner in (7, 8)] == [0, 1]
    assert (rows.used_slots, rows.free_slots) == (2, 1)


def test_released_slot_is_filled_by_the_last() -> None:
    rows = SlotTable(3)
    for owner, tokens in ((7, 20), (8, 30), (9, 40)):
        read_whole(rows, owner, [owner] * tokens)
    rows.append_token(2)
    assert rows.release(7) == [SwapSlots(0, 2, 41)]
    assert (rows.slot_of(9), rows.slot_of(8), rows.used_slots) == (0, 1, 2)
    assert rows.used_tokens(0) == 41


def test_release_of_the_last_slot_moves_nothing() -> None:
    rows = SlotTable(2)
    rows.acquire(7)
    rows.acquire(8)
    assert rows.release(8) == []


def test_transfer_keeps_the_slot() -> None:
    rows = SlotTable(2)
    rows.acquire(7)
    rows.acquire(8)
    rows.transfer(7, 9)
    assert (rows.slot_of(9), rows.slot_of(8), rows.free_slots) == (0, 1, 0)


def test_prefix_of_a_used_slot_is_copied() -> None:
    rows = SlotTable(3)
    read_whole(rows, 1, [*SYSTEM, 1, 2, 3])
    shared, moves = read_whole(rows, 2, [*SYSTEM, 4, 5, 6])
    assert (shared, moves) == (len(SYSTEM), [CopySlot(0, 1, len(SYSTEM))])


def test_prefix_of_the_same_slot_is_reused() -> None:
    rows = SlotTable(2)
    read_whole(rows, 1, SYSTEM)
    rows.release(1)
    assert read_whole(rows, 2, [*SYSTEM, 4, 5]) == (len(SYSTEM), [])


def test_prefix_of_a_free_slot_is_swapped_in() -> None:
    rows = SlotTable(3)
    read_whole(rows, 1, [1] * 20)
    read_whole(rows, 2, SYSTEM)
    rows.release(2)
    rows.release(1)
    shared, moves = read_whole(rows, 3, [*SYSTEM, 4, 5])
    assert (shared, moves) == (len(SYSTEM), [SwapSlots(1, 0, len(SYSTEM))])


def test_prefix_survives_other_requests() -> None:
    rows = SlotTable(3)
    for owner, prompt in ((1, SYSTEM), (2, [2] * 30), (3, [3] * 30)):
        read_whole(rows, owner, prompt)
        rows.release(owner)
    assert read_whole(rows, 4, [*SYSTEM, 4, 5])[0] == len(SYSTEM)


def test_least_recently_used_prefix_is_evicted() -> None:
    rows = SlotTable(2)
    for owner in (1, 2, 3):
        read_whole(rows, owner, [owner] * 30)
        rows.release(owner)
    assert read_whole(rows, 4, [1] * 40)[0] == 0
    rows.release(4)
    assert read_whole(rows, 5, [3] * 40)[0] == 30


def test_generated_tokens_are_not_cached() -> None:
    rows = SlotTable(2)
    read_whole(rows, 1, SYSTEM)
    for _ in range(5):
        rows.append_token(0)
    assert rows.used_tokens(0) == len(SYSTEM) + 5
    rows.release(1)
    assert rows.used_tokens(0) == len(SYSTEM)


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
    rows = SlotTable(2)
    read_whole(rows, 1, before)
    assert read_whole(rows, 2, prompt)[0] == shared


def test_skip_prefix_cache_reuses_nothing() -> None:
    rows = SlotTable(2)
    read_whole(rows, 1, SYSTEM)
    rows.acquire(2)
    assert rows.start_prompt(1, SYSTEM, skip_prefix_cache=True) == (0, [])


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_keep_slots_unique(seed: int) -> None:
    """Apply the moves of random requests to a list of slots; every job must keep its tokens."""
    chance = random.Random(seed)
    rows, memory = SlotTable(4), [[] for _ in range(4)]
    prompts: dict[int, list[int]] = {}
    prefixes = [[b] * chance.randint(1, 40) for b in range(3)]

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
        if rows.free_slots and chance.random() < 0.6:
            prompt = [*chance.choice(prefixes), *[owner] * chance.randint(2, 30)]
            row = rows.acquire(owner)
            shared, moves = rows.start_prompt(row, prompt)
            carry_out(moves)
            memory[row][shared:] = prompt[shared:]
            rows.append_prompt(row, prompt[shared:])
            prompts[owner] = prompt
        elif prompts:
            left = chance.choice(list(prompts))
            del prompts[left]
            carry_out(rows.release(left))
        taken = [rows.slot_of(one) for one in prompts]
        assert sorted(taken) == list(range(len(prompts)))
        assert rows.free_slots + len(prompts) == 4
        for one, prompt in prompts.items():
            assert memory[rows.slot_of(one)][: len(prompt)] == prompt


def test_prefix_of_another_scope_is_not_found() -> None:
    rows = SlotTable(3)
    for owner, scope, cached in ((1, "alice", 0), (2, "bob", 0), (3, "alice", 40)):
        slot = rows.acquire(owner)
        shared, _ = rows.start_prompt(slot, [*SYSTEM, owner, owner], scope)
        assert shared == cached
        rows.append_prompt(slot, [*SYSTEM, owner, owner][shared:])


def test_saved_prefix_keeps_its_scope() -> None:
    rows = SlotTable(2)
    rows.acquire(1)
    rows.start_prompt(0, SYSTEM, "alice")
    rows.append_prompt(0, SYSTEM)
    rows.release(1)
    rows.acquire(2)
    # Alice's cached prompt moves to the free slot. Then Bob's prompt overwrites slot 0.
    assert rows.start_prompt(0, [*SYSTEM, 1, 2], "bob")[0] == 0
    rows.release(2)
    rows.acquire(3)
    assert rows.start_prompt(0, [*SYSTEM, 1, 2], "bob")[0] == 0
    rows.release(3)
    rows.acquire(4)
    assert rows.start_prompt(0, [*SYSTEM, 1, 2], "alice")[0] == len(SYSTEM)
