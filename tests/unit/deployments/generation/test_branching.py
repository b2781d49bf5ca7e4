"""Rows of a request that keeps several beginnings of its answer."""

from __future__ import annotations

import random

import pytest

from deployments.generation.slots import CopySlot, RowTable


def carried_out(memory: dict[int, str], moves: list[CopySlot]) -> dict[int, str]:
    """Which text lies in which row afterwards."""
    after = dict(memory)
    for move in moves:
        assert move.source not in {m.target for m in moves}, "a source is overwritten"
        after[move.target] = memory[move.source]
    return after


@pytest.mark.parametrize(
    "parents", [[0, 1, 2], [0, 0, 0], [2, 2, 1], [1, 0, 2], [0, 0], [2], [1, 2, 0]]
)
def test_every_beam_goes_on_from_its_parent(parents: list[int]) -> None:
    rows = RowTable(5)
    rows.take("other")
    owners = ["a", "b", "c"]
    for owner in owners:
        rows.take(owner)
    memory = {rows.row_of(owner): owner for owner in ("other", *owners)}
    moves = rows.branch(owners, parents)
    after = carried_out(memory, moves)
    for owner, parent in zip(owners, parents, strict=False):
        assert after[rows.row_of(owner)] == owners[parent]
    assert after[rows.row_of("other")] == "other"
    assert sorted(rows.row_of(owner) for owner in owners) == [1, 2, 3]


def test_only_what_is_needed_is_copied() -> None:
    rows = RowTable(3)
    for owner in "abc":
        rows.take(owner)
    assert rows.branch("abc", [2, 0, 1]) == []
    assert len(rows.branch("abc", [0, 0, 1])) == 1


def test_what_is_copied_is_as_long_as_the_parents_memory() -> None:
    rows = RowTable(2)
    for owner in "ab":
        rows.take(owner)
    for _ in range(7):
        rows.wrote(0)
    assert rows.branch("ab", [0, 0]) == [CopySlot(0, 1, 7)]
    assert rows.filled(1) == 7


@pytest.mark.parametrize("seed", range(10))
def test_many_branchings_keep_everybodys_history(seed: int) -> None:
    chance = random.Random(seed)
    rows, owners = RowTable(4), list("abcd")
    for owner in owners:
        rows.take(owner)
    memory = {rows.row_of(owner): "" for owner in owners}
    history = dict.fromkeys(owners, "")
    for step in range(50):
        parents = [chance.randrange(4) for _ in owners]
        before = dict(history)
        memory = carried_out(memory, rows.branch(owners, parents))
        for owner, parent in zip(owners, parents, strict=True):
            history[owner] = before[owners[parent]] + f"{step}{owner} "
            memory[rows.row_of(owner)] += f"{step}{owner} "
            rows.wrote(rows.row_of(owner))
        assert {owner: memory[rows.row_of(owner)] for owner in owners} == history
