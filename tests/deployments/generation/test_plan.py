from __future__ import annotations

import pytest

from deployments.config import SchedulingSettings
from deployments.generation.plan import FEWEST, PromptPart, ReadingSpeed, Unread, plan_reading

RULES = SchedulingSettings(stall_ms=100, part_tokens=256, fewest_part_tokens=16)


def parts(
    unread: list[int], answering: int, tokens_per_s: float, rules: SchedulingSettings = RULES
) -> list[tuple[int, int]]:
    """The plan for prompts of these lengths, in rows 0, 1, ..."""
    waiting = [Unread(row, tokens) for row, tokens in enumerate(unread)]
    return [tuple(part) for part in plan_reading(waiting, answering, tokens_per_s, rules)]


@pytest.mark.parametrize(
    ("unread", "answering", "tokens_per_s", "expected"),
    [
        pytest.param([], 3, 1_000, [], id="nothing to read"),
        pytest.param([40], 0, 1_000, [(0, 40)], id="whole when nobody waits"),
        pytest.param([1_500], 0, 1_000, [(0, 256)], id="a part when nobody waits"),
        pytest.param([1_500], 7, 1_000, [(0, 100)], id="what the time allows"),
        pytest.param([1_500], 7, 50, [(0, 16)], id="the least, however slow"),
        pytest.param([1_500], 7, 100_000, [(0, 256)], id="never more than a part"),
        pytest.param([30, 30, 30, 30], 7, 1_000, [(0, 30), (1, 30), (2, 30)], id="several short"),
        pytest.param([30, 400], 7, 1_000, [(0, 30), (1, 70)], id="the next gets the rest"),
        pytest.param([95, 400], 7, 1_000, [(0, 95)], id="a rest too small to be worth it"),
        pytest.param([400, 30], 7, 1_000, [(0, 100)], id="first come, first served"),
        pytest.param([1], 7, 1_000, [(0, 1)], id="a single token"),
        pytest.param([101], 7, 1_000, [(0, 99)], id="no rest of one token"),
        pytest.param([257], 0, 1_000, [(0, 255)], id="nor when nobody waits"),
    ],
)
def test_what_is_read(
    unread: list[int], answering: int, tokens_per_s: float, expected: list[tuple[int, int]]
) -> None:
    assert parts(unread, answering, tokens_per_s) == expected


@pytest.mark.parametrize("most", [2, 3, 7, 16])
@pytest.mark.parametrize("tokens", range(2, 60))
def test_no_part_of_a_prompt_is_a_single_token(tokens: int, most: int) -> None:
    rules = SchedulingSettings(stall_ms=1, part_tokens=most, fewest_part_tokens=2)
    read = []
    while tokens:
        ((_, part),) = parts([tokens], 1, most * 1_000, rules)
        read.append(part)
        tokens -= part
    assert min(read) >= FEWEST
    assert max(read) <= max(most, 3)


def test_the_time_is_kept_by_all_parts_together() -> None:
    planned = parts([20] * 50, 7, 1_000)
    assert sum(tokens for _, tokens in planned) <= 100
    assert planned == [(row, 20) for row in range(5)]


def test_a_slow_part_counts_at_once_and_a_fast_one_by_and_by() -> None:
    speed = ReadingSpeed(1_000)
    speed.learn(100, took_s=0.2, fewest=16)
    assert speed.tokens_per_s == 500
    speed.learn(100, took_s=0.1, fewest=16)
    assert speed.tokens_per_s == 625


def test_a_short_part_says_nothing_of_speed() -> None:
    speed = ReadingSpeed(1_000)
    speed.learn(15, took_s=10, fewest=16)
    assert speed.tokens_per_s == 1_000


def test_a_part_names_its_row() -> None:
    assert plan_reading([Unread(5, 4)], 0, 1.0, RULES) == [PromptPart(5, 4)]
