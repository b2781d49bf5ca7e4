from __future__ import annotations

import pytest

from deployments.errors import InputTooLong
from deployments.ingress.limits import check_total_length, limit_text_length
from deployments.messages import Text, Truncation
from deployments.tasks import TaskInput


def parsed(*texts: Text, truncation: Truncation = Truncation.REFUSE) -> TaskInput:
    fields = tuple(f"inputs[{i}]" for i in range(len(texts)))
    return TaskInput(texts, fields, None, truncation)


def test_texts_within_the_limit_are_unchanged() -> None:
    full = parsed("abcd", ("abcd", "efgh"))
    assert limit_text_length(full, 4) is full


@pytest.mark.parametrize("text", ["abcde", ("abcde", ""), ("a", "bcdef")])
def test_text_above_the_limit_is_named(text: Text) -> None:
    with pytest.raises(InputTooLong, match="has 5 characters; the maximum is 4") as raised:
        limit_text_length(parsed("a", text), 4)
    assert raised.value.field == "inputs[1]"


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        (Truncation.KEEP_START, ("abc", ("abc", "d"))),
        (Truncation.KEEP_END, ("cde", ("bcd", "d"))),
    ],
)
def test_each_segment_is_truncated_separately(
    truncation: Truncation, expected: tuple[Text, ...]
) -> None:
    cut = limit_text_length(parsed("abcde", ("abcd", "d"), truncation=truncation), 3)
    assert cut.texts == expected


def test_repeated_text_counts_repeatedly() -> None:
    pairs = parsed(*[("query", "text")] * 3)
    assert check_total_length(pairs, 27) is pairs
    with pytest.raises(InputTooLong, match="27 characters in total; the maximum is 26") as raised:
        check_total_length(pairs, 26)
    assert raised.value.field == "inputs"


def test_total_length_error_names_the_list() -> None:
    searched = TaskInput(
        ("query", *["text"] * 3),
        ("inputs.query", *(f"inputs.texts[{i}]" for i in range(3))),
        None,
        Truncation.REFUSE,
        many="inputs.texts",
    )
    with pytest.raises(InputTooLong, match="makes 17 characters") as raised:
        check_total_length(searched, 16)
    assert raised.value.field == "inputs.texts"
