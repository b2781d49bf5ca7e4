from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from deployments.errors import EmptyInput, InputTooLong
from deployments.messages import Call, Text, Truncation, Windowing
from deployments.tokenization.tokenizer import (
    ENTRY_OVERHEAD_BYTES,
    MAX_CALL_WINDOWS,
    CachingTokenizer,
    TokenCache,
    TokenizedTexts,
)
from tests.support.builders import tiny_tokenizer
from tests.support.fakes import far_deadline, item

MAX_TOKENS = 6  # four words between [CLS] and [SEP]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(path)
    return path


def call(*texts: Text, truncation: Truncation = Truncation.REFUSE) -> Call:
    fields = tuple(f"inputs[{i}]" for i in range(len(texts)))
    return Call(texts, fields, None, truncation, far_deadline())


def words(directory: Path, ids: np.ndarray) -> str:
    return Tokenizer.from_file(str(directory / "tokenizer.json")).decode(
        ids.tolist(), skip_special_tokens=False
    )


def test_texts_become_ids_with_special_tokens(directory: Path) -> None:
    (encoded,) = CachingTokenizer(directory, MAX_TOKENS).tokenize([call("good film", "the")])
    assert isinstance(encoded, TokenizedTexts)
    assert [words(directory, item.ids) for item in encoded.items] == [
        "[CLS] good film [SEP]",
        "[CLS] the [SEP]",
    ]
    assert all(item.ids.dtype == np.int32 for item in encoded.items)
    assert encoded.truncated == 0


def test_a_text_at_the_limit_fits_and_one_token_more_does_not(directory: Path) -> None:
    encoder = CachingTokenizer(directory, MAX_TOKENS)
    fits, too_long = encoder.tokenize([call("good " * 4), call("the", "good " * 5)])
    assert isinstance(fits, TokenizedTexts)
    assert len(fits.items[0].ids) == MAX_TOKENS
    assert isinstance(too_long, InputTooLong)
    assert too_long.field == "inputs[1]"
    assert "7 tokens" in too_long.message
    assert "the maximum is 6" in too_long.message


def test_a_text_too_long_does_not_disturb_its_neighbours(directory: Path) -> None:
    encoder = CachingTokenizer(directory, MAX_TOKENS)
    before, refused, after = encoder.tokenize([call("good"), call("bad " * 9), call("film")])
    assert isinstance(refused, InputTooLong)
    assert words(directory, before.items[0].ids) == "[CLS] good [SEP]"
    assert words(directory, after.items[0].ids) == "[CLS] film [SEP]"


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation.KEEP_START, "[CLS] the good film is [SEP]"),
        (Truncation.KEEP_END, "[CLS] film is the bad [SEP]"),
    ],
)
def test_truncation_keeps_the_side_it_names_and_is_counted(
    truncation: Truncation, kept: str, directory: Path
) -> None:
    text = "the good film is the bad"
    (encoded,) = CachingTokenizer(directory, MAX_TOKENS).tokenize(
        [call(text, "the", truncation=truncation)]
    )
    assert words(directory, encoded.items[0].ids) == kept
    assert encoded.truncated == 1


def test_a_remembered_text_is_cut_for_one_and_refused_to_another(directory: Path) -> None:
    encoder = CachingTokenizer(directory, MAX_TOKENS, cache_bytes=10_000)
    text = "good " * 9
    for _ in range(2):
        cut, refused = encoder.tokenize([call(text, truncation=Truncation.KEEP_START), call(text)])
        assert len(cut.items[0].ids) == MAX_TOKENS
        assert isinstance(refused, InputTooLong)
        assert "11 tokens" in refused.message


def test_an_encoding_from_memory_equals_a_fresh_one(directory: Path) -> None:
    remembering = CachingTokenizer(directory, MAX_TOKENS, cache_bytes=10_000)
    forgetful = CachingTokenizer(directory, MAX_TOKENS)
    for text in ("good film", "GOOD film", "good film", " ", "日本", "good film"):
        (remembered,), (fresh,) = (
            remembering.tokenize([call(text)]),
            forgetful.tokenize([call(text)]),
        )
        assert remembered.items[0].ids.tolist() == fresh.items[0].ids.tolist()


def test_limits_written_in_the_tokenizer_file_do_not_count(directory: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (encoded,) = CachingTokenizer(tmp_path, MAX_TOKENS).tokenize([call("the good film")])
    assert words(directory, encoded.items[0].ids) == "[CLS] the good film [SEP]"


def test_remembered_bytes_never_exceed_the_bound() -> None:
    remembered = item(0, length=5)
    size = 4 * len("text 0") + remembered.ids.nbytes + ENTRY_OVERHEAD_BYTES
    cache = TokenCache(3 * size)
    for i in range(5):
        cache.put(f"text {i}", remembered)
        cache.get("text 0")  # used all the time, so it stays
    assert cache.bytes == 3 * size
    assert [i for i in range(5) if cache.get(f"text {i}") is not None] == [0, 3, 4]
    cache.resize(size)
    assert cache.bytes == size
    cache.resize(0)
    assert cache.bytes == 0


def test_a_pair_is_joined_by_the_tokenizers_own_template(directory: Path) -> None:
    (encoded,) = CachingTokenizer(directory, 9).tokenize(
        [call(("good film", "the river"), "night")]
    )
    pair, single = encoded.items
    assert words(directory, pair.ids) == "[CLS] good film [SEP] the river [SEP]"
    assert words(directory, pair.ids[pair.second_segment_start :]) == "the river [SEP]"
    assert single.second_segment_start == len(single.ids) == 3


def test_a_tokenizer_that_knows_no_segments_gives_none(directory: Path, tmp_path: Path) -> None:
    """RoBERTa's way: two separators between the segments, and one type for both."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.RobertaProcessing(*ends)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (encoded,) = CachingTokenizer(tmp_path, 9).tokenize([call(("good film", "night"))])
    (pair,) = encoded.items
    assert words(directory, pair.ids) == "[CLS] good film [SEP] [SEP] night [SEP]"
    assert pair.second_segment_start == len(pair.ids)


@pytest.mark.parametrize(
    ("pair", "truncation", "kept"),
    [
        (("the", "good bad great awful"), Truncation.KEEP_START, "[CLS] the [SEP] good bad [SEP]"),
        (("the", "good bad great awful"), Truncation.KEEP_END, "[CLS] the [SEP] great awful [SEP]"),
        (("good bad great awful", "the"), Truncation.KEEP_START, "[CLS] good bad [SEP] the [SEP]"),
    ],
)
def test_of_a_pair_the_longer_segment_is_cut_first(
    pair: Text, truncation: Truncation, kept: str, directory: Path
) -> None:
    (encoded,) = CachingTokenizer(directory, MAX_TOKENS).tokenize(
        [call(pair, truncation=truncation)]
    )
    assert words(directory, encoded.items[0].ids) == kept
    assert encoded.truncated == 1


def test_a_pair_too_long_is_refused_with_its_tokens(directory: Path) -> None:
    (refused,) = CachingTokenizer(directory, MAX_TOKENS).tokenize(
        [call(("good bad", "great awful"))]
    )
    assert isinstance(refused, InputTooLong)
    assert "7 tokens" in refused.message


@pytest.mark.parametrize("windowing", [None, Windowing(stride=1)])
def test_a_text_without_a_single_token_is_refused_by_name(
    windowing: Windowing | None, directory: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = None  # which adds the special tokens
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    asked = (call("good", " ")._replace(windowing=windowing), call("good"))
    refused, answered = CachingTokenizer(tmp_path, MAX_TOKENS).tokenize(asked)
    assert isinstance(refused, EmptyInput)
    assert refused.field == "inputs[1]"
    assert len(answered.items[0].ids) == 1


def test_the_windows_of_a_whole_call_are_bounded(directory: Path) -> None:
    encoder = CachingTokenizer(directory, 4)  # two words, one of them shared
    text = " ".join(["good"] * 1025)  # 1024 windows
    few, many = (
        call(*[text] * count)._replace(windowing=Windowing(stride=1)) for count in (4, 100)
    )
    taken, refused = encoder.tokenize([few, many])
    assert len(taken.items) == MAX_CALL_WINDOWS
    assert isinstance(refused, InputTooLong)
    assert refused.field == "inputs[4]", "those behind it are not even read"


def test_a_remembered_pair_is_not_taken_for_its_segments(directory: Path) -> None:
    remembering = CachingTokenizer(directory, 9, cache_bytes=10_000)
    texts: tuple[Text, ...] = ("good film", ("good", "film"), ("good film", ""), ("film", "good"))
    first, again = (remembering.tokenize([call(*texts)])[0] for _ in range(2))
    assert [item.ids.tolist() for item in again.items] == [i.ids.tolist() for i in first.items]
    assert [item.second_segment_start for item in again.items] == [
        i.second_segment_start for i in first.items
    ]
    assert len({tuple(item.ids.tolist()) for item in first.items}) == len(texts)
    assert remembering.tokenize([call(*texts)])[0].items[1] is first.items[1], "it was remembered"


def test_a_remembered_pair_occupies_the_bytes_of_both_segments() -> None:
    cache, remembered = TokenCache(10_000), item(0, length=5)
    cache.put(("good", "film"), remembered)
    assert cache.bytes == 4 * len("goodfilm") + remembered.ids.nbytes + ENTRY_OVERHEAD_BYTES
