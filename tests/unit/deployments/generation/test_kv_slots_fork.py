"""Beam search forks KV cache slots: every beam continues from the slot of its parent."""

from __future__ import annotations

import random

import pytest

from deployments.generation.kv_slots import CopySlot, SlotTable


def carried_out(memory: dict[int, str], moves: list[CopySlot]) -> dict[int, str]:
    """Return the text of each slot after the moves."""
    after = dict(memory)
    for move in moves:
        assert move.source not in {m.target for m in moves}, "a source is overwritten"
        after[move.target] = memory[move.source]
    return after


@pytest.mark.parametrize(
    "parents", [[0, 1, 2], [0, 0, 0], [2, 2, 1], [1, 0, 2], [0, 0], [2], [1, 2, 0]]
)
def test_fork_continues_each_beam_from_its_parent(parents: list[int]) -> None:
    rows = SlotTable(5)
    rows.acquire("other")
    owners = ["a", "b", "c"]
    for owner in owners:
        rows.acquire(owner)
    memory = {rows.slot_of(owner): owner for owner in ("other", *owners)}
    moves = rows.fork(owners, parents)
    after = carried_out(memory, moves)
    for owner, parent in zip(owners, parents, strict=False):
        assert after[rows.slot_of(owner)] == owners[parent]
    assert after[rows.slot_of("other")] == "other"
    assert sorted(rows.slot_of(owner) for owner in owners) == [1, 2, 3]


def test_fork_copies_only_shared_parents() -> None:
    rows = SlotTable(3)
    for owner in "abc":
        rows.acquire(owner)
    assert rows.fork("abc", [2, 0, 1]) == []
    assert len(rows.fork("abc", [0, 0, 1])) == 1


def test_fork_copies_all_tokens_of_the_parent() -> None:
    rows = SlotTable(2)
    for owner in "ab":
        rows.acquire(owner)
    for _ in range(7):
        rows.append_token(0)
    assert rows.fork("ab", [0, 0]) == [CopySlot(0, 1, 7)]
    assert rows.used_tokens(1) == 7


def test_fork_keeps_the_scope_of_the_prefix() -> None:
    prompt = list(range(20))
    rows = SlotTable(2)
    for owner in "ab":
        rows.acquire(owner)
    rows.start_prompt(0, prompt, "mine")
    rows.append_prompt(0, prompt)
    rows.fork("ab", [0, 0])
    for owner in "ab":
        rows.release(owner)
    assert rows.start_prompt(rows.acquire("c"), prompt)[0] == 0
    rows.release("c")
    assert rows.start_prompt(rows.acquire("d"), prompt, "mine")[0] > 0


@pytest.mark.parametrize("seed", range(10))
def test_repeated_forks_keep_all_histories(seed: int) -> None:
    chance = random.Random(seed)
    rows, owners = SlotTable(4), list("abcd")
    for owner in owners:
        rows.acquire(owner)
    memory = {rows.slot_of(owner): "" for owner in owners}
    history = dict.fromkeys(owners, "")
    for step in range(50):
        parents = [chance.randrange(4) for _ in owners]
        before = dict(history)
        memory = carried_out(memory, rows.fork(owners, parents))
        for owner, parent in zip(owners, parents, strict=True):
            history[owner] = before[owners[parent]] + f"{step}{owner} "
            memory[rows.slot_of(owner)] += f"{step}{owner} "
            rows.append_token(rows.slot_of(owner))
        assert {owner: memory[rows.slot_of(owner)] for owner in owners} == history
