from __future__ import annotations

import random

import pytest

from deployments.batching.batches import LOOK_AHEAD, plan_batch
from deployments.config import BatchSettings


def rules(
    max_batch_tokens: int = 100, max_batch_items: int = 8, pass_overhead_tokens: int = 10_000
) -> BatchSettings:
    """Padding costs nothing unless a test says so, so that one rule is looked at at a time."""
    return BatchSettings(
        max_batch_tokens=max_batch_tokens,
        max_batch_items=max_batch_items,
        pass_overhead_tokens=pass_overhead_tokens,
    )


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ([5], [0]),
        ([5, 5, 5], [0, 1, 2]),  # equal lengths stay in order of arrival
        ([9, 3, 6], [1, 2, 0]),  # shortest first
        ([50, 50, 50], [0, 1]),  # 2 x 50 = 100 fits, 3 x 50 does not
        ([500, 5], [0]),  # an oversize oldest runs, alone
        ([5, 500], [0]),
        ([10, 60, 12, 9], [3, 0, 2]),  # 4 x 60 would not fit: the long one waits
    ],
)
def test_a_pass_is_a_window_of_similar_lengths_within_the_budget(
    lengths: list[int], chosen: list[int]
) -> None:
    assert plan_batch(lengths, rules(max_batch_tokens=100)) == chosen


def test_padding_that_costs_more_than_another_pass_is_not_bought() -> None:
    # 20 beside 10 pads 10 tokens: worth it for a pass cost of 10, not for one of 9.
    assert plan_batch([10, 20], rules(pass_overhead_tokens=10)) == [0, 1]
    assert plan_batch([10, 20], rules(pass_overhead_tokens=9)) == [0]


def test_the_neighbour_with_less_padding_is_taken_first() -> None:
    # Beside the oldest (10) stand 9 and 30; only one of them may still come.
    assert plan_batch([10, 30, 9], rules(max_batch_items=2)) == [2, 0]


def test_a_pass_holds_no_more_than_max_items() -> None:
    assert plan_batch([5] * 20, rules(max_batch_tokens=1_000, max_batch_items=3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("waiting", "idle_threads", "taken"), [(8, 1, 8), (8, 2, 4), (7, 2, 4), (1, 4, 1), (8, 0, 8)]
)
def test_idle_engine_threads_share_what_waits(waiting: int, idle_threads: int, taken: int) -> None:
    assert len(plan_batch([5] * waiting, rules(), idle_threads)) == taken


def test_only_the_head_of_a_very_long_line_is_looked_at() -> None:
    line = [5] * LOOK_AHEAD + [4]
    assert plan_batch(line, rules(max_batch_tokens=10**6, max_batch_items=10**6)) == list(
        range(LOOK_AHEAD)
    )


@pytest.mark.parametrize("seed", range(100))
def test_no_plan_breaks_a_rule_whatever_waits(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 4, 16, 64, rng.randint(1, 300)]) for _ in range(rng.randint(1, 80))]
    limits = rules(rng.randint(1, 2_000), rng.randint(1, 40), rng.randint(0, 60))
    idle_threads = rng.randint(1, 4)

    chosen = plan_batch(lengths, limits, idle_threads)

    taken = [lengths[i] for i in chosen]
    padded = max(taken) * len(taken)
    assert 0 in chosen, "the oldest must run"
    assert len(set(chosen)) == len(chosen)
    assert taken == sorted(taken)
    assert padded <= limits.max_batch_tokens or chosen == [0]
    assert padded - sum(taken) <= limits.pass_overhead_tokens
    assert len(chosen) <= min(limits.max_batch_items, -(-len(lengths) // idle_threads))


@pytest.mark.parametrize("seed", range(20))
def test_nothing_starves_while_better_fitting_items_keep_coming(seed: int) -> None:
    rng = random.Random(seed)
    limits = rules(max_batch_tokens=64, max_batch_items=4, pass_overhead_tokens=8)
    line = [(f"first {i}", rng.choice([2, 60])) for i in range(10)]
    passes = 0
    while any(name.startswith("first") for name, _ in line):
        chosen = set(plan_batch([length for _, length in line], limits))
        line = [entry for i, entry in enumerate(line) if i not in chosen]
        line += [("late", 2)] * 4  # as many short ones as a pass can take
        passes += 1
    assert passes <= 10, "an item waits for no more passes than items stood before it"
