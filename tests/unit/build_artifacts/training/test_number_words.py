"""Numbers, dates, times and amounts in words; split of training and held-out expressions."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from build_artifacts.training import number_words as task


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (99, "ninety-nine"),
        (500, "five hundred"),
        (12_345, "twelve thousand three hundred forty-five"),
        (1_000, "one thousand"),
        (task.MAX_NUMBER, "nine hundred ninety-nine thousand nine hundred ninety-nine"),
    ],
)
def test_number_is_spelled(number: int, words: str) -> None:
    assert task.spell_number(number) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "first"),
        (12, "twelfth"),
        (20, "twentieth"),
        (21, "twenty-first"),
        (103, "one hundred third"),
        (1_000, "one thousandth"),
    ],
)
def test_ordinal_is_spelled(number: int, words: str) -> None:
    assert task.spell_ordinal(number) == words


@pytest.mark.parametrize(
    ("year", "words"),
    [
        (1100, "eleven hundred"),
        (1905, "nineteen oh five"),
        (1999, "nineteen ninety-nine"),
        (2000, "two thousand"),
        (2009, "two thousand nine"),
        (2010, "twenty ten"),
    ],
)
def test_year_is_spelled_as_spoken(year: int, words: str) -> None:
    assert task.spell_year(year) == words


def test_date_time_and_amount_are_spelled() -> None:
    assert task.spell_date(2024, 3, 5) == "march fifth, twenty twenty-four"
    assert task.spell_time(14, 5) == "fourteen oh five"
    assert task.spell_time(0, 0) == "zero hundred hours"
    assert task.spell_amount(1, 1) == "one dollar and one cent"
    assert task.spell_amount(12, 0) == "twelve dollars"


def test_held_out_expressions_are_never_trained_on() -> None:
    samples = {
        held_out: set(islice(task.generate_pairs(random.Random(0), held_out=held_out), 3_000))
        for held_out in (False, True)
    }
    assert not samples[False] & samples[True]
    assert all(task.is_held_out(expression) for expression, _ in samples[True])


def test_equal_seeds_generate_equal_pairs() -> None:
    first, second = (task.generate_pairs(random.Random(4), held_out=False) for _ in range(2))
    assert list(islice(first, 50)) == list(islice(second, 50))
