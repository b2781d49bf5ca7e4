from __future__ import annotations

from pathlib import Path

import pytest

from deployments.errors import InputTooLong
from deployments.messages import Call, Truncation, Windowing
from deployments.tokenization import slices, tokenizer
from deployments.tokenization.slices import CallMerger, cut_calls, cut_sequences
from deployments.tokenization.tokenizer import CachingTokenizer
from tests.support.fakes import far_deadline
from tests.support.tiny_encoders import tiny_tokenizer


def call(*texts: str, windowing: Windowing | None = None) -> Call:
    fields = tuple(f"inputs[{i}]" for i in range(len(texts)))
    return Call(texts, fields, None, Truncation.REFUSE, far_deadline(), windowing)


@pytest.fixture
def tiny(tmp_path: Path) -> CachingTokenizer:
    tiny_tokenizer(tmp_path)
    return CachingTokenizer(tmp_path, max_tokens=16)


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_CHARACTERS", 10)


def test_short_calls_share_a_slice_and_long_ones_are_cut(short_slices: None) -> None:
    calls = [call("ab", "cd"), call("ef"), call("ghijkl", "mnop", "qr", "st")]
    cut = [
        [(part.call_index, part.first_text, part.call.texts, part.call.fields) for part in parts]
        for parts in cut_calls(calls)
    ]
    assert cut == [
        [
            (0, 0, ("ab", "cd"), ("inputs[0]", "inputs[1]")),
            (1, 0, ("ef",), ("inputs[0]",)),
            (2, 0, ("ghijkl",), ("inputs[0]",)),
        ],
        [(2, 1, ("mnop", "qr", "st"), ("inputs[1]", "inputs[2]", "inputs[3]"))],
    ]


def test_sequences_are_cut_between_two(short_slices: None) -> None:
    ids = tuple(tuple(range(length)) for length in (4, 6, 0, 20, 1))
    assert list(cut_sequences(ids)) == [ids[:2], ids[2:4], ids[4:]]
    assert list(cut_sequences(("abc",))) == [("abc",)]
    assert list(cut_sequences(())) == []


def tokenize(tiny: CachingTokenizer, whole: Call) -> object:
    merger = CallMerger(whole)
    for part in (part for cut in cut_calls([whole]) for part in cut):
        if merger.error is None:
            merger.add(part, tiny.tokenize([part.call])[0])
    return merger.merge()


@pytest.mark.parametrize("windowing", [None, Windowing(tokens=8, stride=2)])
def test_cut_call_has_the_tokens_of_the_whole(
    windowing: Windowing | None, tiny: CachingTokenizer, short_slices: None
) -> None:
    texts = ("good film", "the night was lovely", "bad", "a train to the city and the river")
    whole = call(*texts, windowing=windowing)
    (expected,) = tiny.tokenize([whole])
    merged = tokenize(tiny, whole)
    assert [item.ids.tolist() for item in merged.items] == [
        item.ids.tolist() for item in expected.items
    ]
    assert [one.text for one in merged.token_offsets] == [
        one.text for one in expected.token_offsets
    ]


def test_error_of_a_part_is_that_of_the_call(tiny: CachingTokenizer, short_slices: None) -> None:
    error = tokenize(tiny, call("good film", "good " * 30, "night"))
    assert isinstance(error, InputTooLong)
    assert error.field == "inputs[1]"


def test_windows_of_all_parts_count_together(
    tiny: CachingTokenizer, short_slices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "MAX_CALL_WINDOWS", 3)
    long = "the night was lovely and the film was good"
    error = tokenize(tiny, call(long, long, windowing=Windowing(tokens=8, stride=1)))
    assert isinstance(error, InputTooLong)
