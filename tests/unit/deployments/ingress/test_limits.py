from __future__ import annotations

import re

import pytest

from deployments.artifacts.pair_template import PairTemplate
from deployments.errors import InputTooLong
from deployments.ingress.limits import check_total_length, count_tokenized, limit_text_length
from deployments.messages import Text, Truncation
from deployments.tasks import TaskInput
from tests.support.artifacts import tiny_manifest


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


@pytest.mark.parametrize(
    ("query", "instruction", "field"),
    [
        ("q" * 9, "", "inputs.query"),
        ("q", "i" * 9, "parameters.instruction"),
        ("q", "", "texts[1]"),
    ],
)
def test_error_names_the_long_part_of_a_pair(query: str, instruction: str, field: str) -> None:
    pairs = ((query, "ab", instruction), (query, "a" * 8, instruction))
    shared = ("inputs.query", None, "parameters.instruction")
    sent = TaskInput(pairs, ("texts[0]", "texts[1]"), None, Truncation.REFUSE, part_fields=shared)
    with pytest.raises(InputTooLong, match=f"`{re.escape(field)}` has [89] characters") as caught:
        limit_text_length(sent, 7)
    assert caught.value.field == field


def test_pairs_share_the_copy_of_a_long_query() -> None:
    query = "q" * 100
    sent = TaskInput(((query, "a"), (query, "b")), ("", ""), None, Truncation.KEEP_START)
    first, second = limit_text_length(sent, 7).texts
    assert first == ("q" * 7, "a")
    assert first[0] is second[0]


def test_pair_template_counts_once_per_pair() -> None:
    sent = TaskInput((("q", "a"), ("q", "b")), ("", ""), None, Truncation.REFUSE)
    plain = tiny_manifest(labels=("SCORE",))
    template = PairTemplate(before_first="Q: ", before_second=" D: ", end="")
    assert count_tokenized(sent, plain) == 4
    assert count_tokenized(sent, plain.model_copy(update={"pair_template": template})) == 18
