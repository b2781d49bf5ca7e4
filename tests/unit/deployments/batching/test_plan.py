from __future__ import annotations

import random

import pytest

from deployments.batching.batch_policy import LOOK_AHEAD, plan_batch
from deployments.config import BatchSettings


def build_settings(
    max_batch_tokens: int = 100, max_batch_items: int = 8, pass_overhead_tokens: int = 10_000
) -> BatchSettings:
    """Build settings without a padding limit by default, to test one limit at a time."""
    return BatchSettings(
        max_batch_tokens=max_batch_tokens,
        max_batch_items=max_batch_items,
        pass_overhead_tokens=pass_overhead_tokens,
    )


@pytest.mark.parametrize(
    ("lengths", "plan"),
    [
        ([5], [0]),
        ([5, 5, 5], [0, 1, 2]),  # equal lengths stay in order of arrival
        ([9, 3, 6], [1, 2, 0]),  # shortest first
        ([50, 50, 50], [0, 1]),  # 2 x 50 = 100 fits, 3 x 50 does not
        ([500, 5], [0]),  # an oversize oldest item runs alone
        ([5, 500], [0]),
        ([10, 60, 12, 9], [3, 0, 2]),  # 4 x 60 tokens do not fit: the long item waits
    ],
)
def test_plan_batch_selects_similar_lengths_within_the_budget(
    lengths: list[int], plan: list[int]
) -> None:
    assert plan_batch(lengths, build_settings(max_batch_tokens=100)) == plan


def test_plan_batch_limits_padding_to_the_pass_overhead() -> None:
    # Items of 10 and 20 tokens make 10 padding tokens. An overhead of 10 allows them, 9 does not.
    assert plan_batch([10, 20], build_settings(pass_overhead_tokens=10)) == [0, 1]
    assert plan_batch([10, 20], build_settings(pass_overhead_tokens=9)) == [0]


def test_plan_batch_prefers_the_neighbor_with_less_padding() -> None:
    # The neighbors of the oldest item (10) are 9 and 30; only one fits.
    assert plan_batch([10, 30, 9], build_settings(max_batch_items=2)) == [2, 0]


def test_plan_batch_respects_max_batch_items() -> None:
    assert plan_batch([5] * 20, build_settings(max_batch_tokens=1_000, max_batch_items=3)) == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("waiting", "idle_threads", "selected"), [(8, 1, 8), (8, 2, 4), (7, 2, 4), (1, 4, 1), (8, 0, 8)]
)
def test_plan_batch_shares_items_between_idle_threads(
    waiting: int, idle_threads: int, selected: int
) -> None:
    assert len(plan_batch([5] * waiting, build_settings(), idle_threads)) == selected


def test_plan_batch_reads_only_the_head_of_a_long_queue() -> None:
    queue = [5] * LOOK_AHEAD + [4]
    assert plan_batch(queue, build_settings(max_batch_tokens=10**6, max_batch_items=10**6)) == list(
        range(LOOK_AHEAD)
    )


@pytest.mark.parametrize("seed", range(100))
def test_plan_batch_of_random_queues_respects_all_limits(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 4, 16, 64, rng.randint(1, 300)]) for _ in range(rng.randint(1, 80))]
    limits = build_settings(rng.randint(1, 2_000), rng.randint(1, 40), rng.randint(0, 60))
    idle_threads = rng.randint(1, 4)

    plan = plan_batch(lengths, limits, idle_threads)

    selected = [lengths[i] for i in plan]
    padded = max(selected) * len(selected)
    assert 0 in plan, "the oldest item must run"
    assert len(set(plan)) == len(plan)
    assert selected == sorted(selected)
    assert padded <= limits.max_batch_tokens or plan == [0]
    assert padded - sum(selected) <= limits.pass_overhead_tokens
    assert len(plan) <= min(limits.max_batch_items, -(-len(lengths) // idle_threads))


@pytest.mark.parametrize("seed", range(20))
def test_plan_batch_does_not_starve_old_items(seed: int) -> None:
    rng = random.Random(seed)
    limits = build_settings(max_batch_tokens=64, max_batch_items=4, pass_overhead_tokens=8)
    queue = [(f"first {i}", rng.choice([2, 60])) for i in range(10)]
    passes = 0
    while any(name.startswith("first") for name, _ in queue):
        plan = set(plan_batch([length for _, length in queue], limits))
        queue = [entry for i, entry in enumerate(queue) if i not in plan]
        queue += [("late", 2)] * 4  # as many short items as fit into a pass
        passes += 1
    assert passes <= 10, "an item waits for at most one pass per older item"
