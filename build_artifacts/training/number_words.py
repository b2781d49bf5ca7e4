"""The task of the model `number-words`: numbers, dates, times and amounts in words.

Expressions are generated, so the answers are exact and no license of a data set applies.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth",
    "nine": "ninth", "twelve": "twelfth",
}  # fmt: skip
MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october", "november", "december",
)  # fmt: skip
MAX_NUMBER = 999_999
_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)  # number of days per month
_HELD_OUT_DIVISOR = 20  # one of this many expressions is held out from training

ExpressionWords = tuple[str, str]  # an expression and its spelling, such as ("21", "twenty-one")


def spell_number(number: int) -> str:
    """Spell 0 to MAX_NUMBER, such as `twelve thousand three hundred forty-five`."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    count, rest = divmod(number, unit)
    return f"{spell_number(count)} {name}" + (f" {spell_number(rest)}" if rest else "")


def spell_ordinal(number: int) -> str:
    """Spell 1 to MAX_NUMBER, such as `twenty-first`."""
    words = spell_number(number)
    start = max(words.rfind(" "), words.rfind("-")) + 1
    last = words[start:]
    regular = f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th"
    return words[:start] + _ORDINALS.get(last, regular)


def spell_year(year: int) -> str:
    """Spell 1100 to 2099 as years are spoken, such as `nineteen oh five`."""
    century, rest = divmod(year, 100)
    if 2000 <= year < 2010:
        return spell_number(year)
    if rest == 0:
        return f"{spell_number(century)} hundred"
    return f"{spell_number(century)} {'oh ' if rest < 10 else ''}{spell_number(rest)}"


def spell_date(year: int, month: int, day: int) -> str:
    """Spell a date, such as `march fifth, twenty twenty-four`."""
    return f"{MONTHS[month - 1]} {spell_ordinal(day)}, {spell_year(year)}"


def spell_time(hour: int, minute: int) -> str:
    """Spell a time of 24 hours, such as `fourteen oh five`."""
    if minute == 0:
        return f"{spell_number(hour)} hundred hours"
    return f"{spell_number(hour)} {'oh ' if minute < 10 else ''}{spell_number(minute)}"


def spell_amount(dollars: int, cents: int) -> str:
    """Spell an amount, such as `one dollar and fifty cents`."""
    words = f"{spell_number(dollars)} dollar{'' if dollars == 1 else 's'}"
    return words + (f" and {spell_number(cents)} cent{'' if cents == 1 else 's'}" if cents else "")


def generate_pairs(rng: random.Random, *, held_out: bool) -> Iterator[ExpressionWords]:
    """Yield pairs without end: only held-out expressions, or only expressions for training."""
    while True:
        pair = rng.choice(_KINDS)(rng)
        if is_held_out(pair[0]) == held_out:
            yield pair


def is_held_out(expression: str) -> bool:
    """Return whether the expression is held out from training, according to its digest."""
    digest = hashlib.sha256(expression.encode()).digest()
    return digest[0] * 256 + digest[1] < 65536 // _HELD_OUT_DIVISOR


def _number(rng: random.Random) -> ExpressionWords:
    number = _draw_number(rng)
    return (f"{number:,}" if rng.random() < 0.3 else str(number)), spell_number(number)


def _ordinal(rng: random.Random) -> ExpressionWords:
    number = max(1, _draw_number(rng) % 10_000)
    teen = number // 10 % 10 == 1
    ending = "th" if teen else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}", spell_ordinal(number)


def _date(rng: random.Random) -> ExpressionWords:
    year, month, day = _draw_date(rng)
    forms = (f"{year}-{month:02}-{day:02}", f"{day} {MONTHS[month - 1]} {year}")
    return rng.choice(forms), spell_date(year, month, day)


def _time(rng: random.Random) -> ExpressionWords:
    hour, minute = rng.randrange(24), rng.randrange(60)
    return f"{hour:02}:{minute:02}", spell_time(hour, minute)


def _date_and_time(rng: random.Random) -> ExpressionWords:
    date, date_words = _date(rng)
    time, time_words = _time(rng)
    return f"{date} {time}", f"{date_words}, {time_words}"


def _amount(rng: random.Random) -> ExpressionWords:
    dollars, cents = _draw_number(rng) % 10_000, rng.choice((0, rng.randrange(100)))
    written = f"${dollars}.{cents:02}" if cents else f"${dollars}"
    return written, spell_amount(dollars, cents)


_KINDS: tuple[Callable[[random.Random], ExpressionWords], ...] = (
    _number, _number, _ordinal, _date, _time, _date_and_time, _amount,
)  # fmt: skip


def _draw_number(rng: random.Random) -> int:
    """Draw one to six digits, each count equally likely, and return them as a number.

    After the first digit, a quarter of the digits are zeros.
    """
    digits = [rng.choice("0123456789")]
    for _ in range(rng.randrange(6)):
        digits.append(rng.choice(("0", *"0123456789", "0")))
    return int("".join(digits))


def _draw_date(rng: random.Random) -> tuple[int, int, int]:
    year = rng.choice((rng.randrange(1100, 2100), rng.randrange(1900, 2100)))
    month = rng.randrange(1, 13)
    return year, month, rng.randint(1, _DAYS[month - 1])
