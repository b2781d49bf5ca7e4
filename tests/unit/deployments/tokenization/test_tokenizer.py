from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from deployments.artifacts.pair_template import PairTemplate
from deployments.errors import EmptyInput, InputTooLong
from deployments.messages import Call, Text, Truncation, Windowing
from deployments.tokenization.tokenizer import (
    ENTRY_OVERHEAD_BYTES,
    MAX_CALL_WINDOWS,
    CachingTokenizer,
    TokenCache,
    TokenizedTexts,
)
from tests.support.fakes import far_deadline, item
from tests.support.tiny_encoders import tiny_tokenizer

MAX_TOKENS = 6  # four tokens between [CLS] and [SEP]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(path)
    return path


def call(*texts: Text, truncation: Truncation = Truncation.REFUSE) -> Call:
    fields = tuple(f"inputs[{i}]" for i in range(len(texts)))
    return Call(texts, fields, None, truncation, far_deadline())


def read_tokens(directory: Path, ids: np.ndarray) -> str:
    return Tokenizer.from_file(str(directory / "tokenizer.json")).decode(
        ids.tolist(), skip_special_tokens=False
    )


def test_tokenize_adds_special_tokens(directory: Path) -> None:
    (encoded,) = CachingTokenizer(directory, MAX_TOKENS).tokenize([call("good film", "the")])
    assert isinstance(encoded, TokenizedTexts)
    assert [read_tokens(directory, item.ids) for item in encoded.items] == [
        "[CLS] good film [SEP]",
        "[CLS] the [SEP]",
    ]
    assert all(item.ids.dtype == np.int32 for item in encoded.items)
    assert encoded.truncated == 0


def test_tokenize_rejects_texts_beyond_max_tokens(directory: Path) -> None:
    tokenizer = CachingTokenizer(directory, MAX_TOKENS)
    fits, too_long = tokenizer.tokenize([call("good " * 4), call("the", "good " * 5)])
    assert isinstance(fits, TokenizedTexts)
    assert len(fits.items[0].ids) == MAX_TOKENS
    assert isinstance(too_long, InputTooLong)
    assert too_long.field == "inputs[1]"
    assert "7 tokens" in too_long.message
    assert "the maximum is 6" in too_long.message


def test_too_long_text_does_not_affect_other_calls(directory: Path) -> None:
    tokenizer = CachingTokenizer(directory, MAX_TOKENS)
    before, rejected, after = tokenizer.tokenize([call("good"), call("bad " * 9), call("film")])
    assert isinstance(rejected, InputTooLong)
    assert read_tokens(directory, before.items[0].ids) == "[CLS] good [SEP]"
    assert read_tokens(directory, after.items[0].ids) == "[CLS] film [SEP]"


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        (Truncation.KEEP_START, "[CLS] the good film is [SEP]"),
        (Truncation.KEEP_END, "[CLS] film is the bad [SEP]"),
    ],
)
def test_truncation_keeps_its_side_and_is_counted(
    truncation: Truncation, expected: str, directory: Path
) -> None:
    text = "the good film is the bad"
    (encoded,) = CachingTokenizer(directory, MAX_TOKENS).tokenize(
        [call(text, "the", truncation=truncation)]
    )
    assert read_tokens(directory, encoded.items[0].ids) == expected
    assert encoded.truncated == 1


def test_cached_text_is_truncated_or_rejected_per_call(directory: Path) -> None:
    tokenizer = CachingTokenizer(directory, MAX_TOKENS, TokenCache(10_000))
    text = "good " * 9
    for _ in range(2):
        cut, rejected = tokenizer.tokenize(
            [call(text, truncation=Truncation.KEEP_START), call(text)]
        )
        assert len(cut.items[0].ids) == MAX_TOKENS
        assert isinstance(rejected, InputTooLong)
        assert "11 tokens" in rejected.message


def test_cached_item_equals_a_new_one(directory: Path) -> None:
    cached = CachingTokenizer(directory, MAX_TOKENS, TokenCache(10_000))
    uncached = CachingTokenizer(directory, MAX_TOKENS)
    for text in ("good film", "GOOD film", "good film", " ", "日本", "good film"):
        (cached_item,), (fresh,) = (
            cached.tokenize([call(text)]),
            uncached.tokenize([call(text)]),
        )
        assert cached_item.items[0].ids.tolist() == fresh.items[0].ids.tolist()


def test_limits_in_the_tokenizer_file_are_ignored(directory: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (encoded,) = CachingTokenizer(tmp_path, MAX_TOKENS).tokenize([call("the good film")])
    assert read_tokens(directory, encoded.items[0].ids) == "[CLS] the good film [SEP]"


def test_cache_bytes_never_exceed_the_limit() -> None:
    cached_item = item(0, length=5)
    size = 4 * len("text 0") + cached_item.ids.nbytes + ENTRY_OVERHEAD_BYTES
    cache = TokenCache(3 * size)
    for i in range(5):
        cache.put("a", f"text {i}", cached_item)
        cache.get("a", "text 0")  # so `text 0` is never the least recently used
    assert cache.bytes == 3 * size
    assert [i for i in range(5) if cache.get("a", f"text {i}") is not None] == [0, 3, 4]
    assert cache.get("b", "text 0") is None, "tokens of another tokenizer"
    cache.resize(size)
    assert cache.bytes == size
    cache.resize(0)
    assert cache.bytes == 0


def test_pair_uses_the_template_of_the_tokenizer(directory: Path) -> None:
    (encoded,) = CachingTokenizer(directory, 9).tokenize(
        [call(("good film", "the river"), "night")]
    )
    pair, single = encoded.items
    assert read_tokens(directory, pair.ids) == "[CLS] good film [SEP] the river [SEP]"
    assert read_tokens(directory, pair.ids[pair.second_segment_start :]) == "the river [SEP]"
    assert single.second_segment_start == len(single.ids) == 3


def test_tokenizer_without_segment_types_gives_no_second_segment(
    directory: Path, tmp_path: Path
) -> None:
    # RoBERTa has two separators between the segments and one type for both.
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.RobertaProcessing(*ends)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (encoded,) = CachingTokenizer(tmp_path, 9).tokenize([call(("good film", "night"))])
    (pair,) = encoded.items
    assert read_tokens(directory, pair.ids) == "[CLS] good film [SEP] [SEP] night [SEP]"
    assert pair.second_segment_start == len(pair.ids)


@pytest.mark.parametrize(
    ("pair", "truncation", "expected"),
    [
        (("the", "good bad great awful"), Truncation.KEEP_START, "[CLS] the [SEP] good bad [SEP]"),
        (("the", "good bad great awful"), Truncation.KEEP_END, "[CLS] the [SEP] great awful [SEP]"),
        (("good bad great awful", "the"), Truncation.KEEP_START, "[CLS] good bad [SEP] the [SEP]"),
    ],
)
def test_truncation_of_a_pair_shortens_the_longer_segment(
    pair: Text, truncation: Truncation, expected: str, directory: Path
) -> None:
    (encoded,) = CachingTokenizer(directory, MAX_TOKENS).tokenize(
        [call(pair, truncation=truncation)]
    )
    assert read_tokens(directory, encoded.items[0].ids) == expected
    assert encoded.truncated == 1


def test_too_long_pair_error_reports_its_tokens(directory: Path) -> None:
    (rejected,) = CachingTokenizer(directory, MAX_TOKENS).tokenize(
        [call(("good bad", "great awful"))]
    )
    assert isinstance(rejected, InputTooLong)
    assert "7 tokens" in rejected.message


@pytest.mark.parametrize("windowing", [None, Windowing(stride=1)])
def test_text_without_tokens_error_names_its_field(
    windowing: Windowing | None, directory: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = None  # the tokenizer adds no special tokens
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    calls = (call("good", " ")._replace(windowing=windowing), call("good"))
    rejected, answered = CachingTokenizer(tmp_path, MAX_TOKENS).tokenize(calls)
    assert isinstance(rejected, EmptyInput)
    assert rejected.field == "inputs[1]"
    assert len(answered.items[0].ids) == 1


def test_windows_per_call_are_limited(directory: Path) -> None:
    tokenizer = CachingTokenizer(directory, 4)  # windows of two tokens that overlap by one
    text = " ".join(["good"] * 1025)  # 1024 windows
    few, many = (
        call(*[text] * count)._replace(windowing=Windowing(stride=1)) for count in (4, 100)
    )
    accepted, rejected = tokenizer.tokenize([few, many])
    assert len(accepted.items) == MAX_CALL_WINDOWS
    assert isinstance(rejected, InputTooLong)
    assert rejected.field == "inputs[4]", "later texts are not tokenized"


def test_cache_distinguishes_pairs_from_their_segments(directory: Path) -> None:
    cached = CachingTokenizer(directory, 9, TokenCache(10_000))
    texts: tuple[Text, ...] = ("good film", ("good", "film"), ("good film", ""), ("film", "good"))
    first, again = (cached.tokenize([call(*texts)])[0] for _ in range(2))
    assert [item.ids.tolist() for item in again.items] == [i.ids.tolist() for i in first.items]
    assert [item.second_segment_start for item in again.items] == [
        i.second_segment_start for i in first.items
    ]
    assert len({tuple(item.ids.tolist()) for item in first.items}) == len(texts)
    assert cached.tokenize([call(*texts)])[0].items[1] is first.items[1], "it comes from the cache"


def test_cached_pair_counts_the_bytes_of_both_segments() -> None:
    cache, cached_item = TokenCache(10_000), item(0, length=5)
    cache.put("a", ("good", "film"), cached_item)
    assert cache.bytes == 4 * len("goodfilm") + cached_item.ids.nbytes + ENTRY_OVERHEAD_BYTES


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        (Truncation.KEEP_START, "[CLS] the good : film film is it [SEP]"),
        (Truncation.KEEP_END, "[CLS] film film film film film is it [SEP]"),
    ],
)
def test_pairs_are_joined_by_the_template_whose_end_is_kept(
    truncation: Truncation, expected: str, directory: Path
) -> None:
    template = PairTemplate(before_first="the ", before_second=": ", end=" is it", end_tokens=3)
    tokenizer = CachingTokenizer(directory, 9, TokenCache(10_000), pair_template=template)
    pair = ("good", "film " * 9)
    for _ in range(2):  # the second call finds the whole text in the cache
        calls = [call(("good", "film"), pair, template.join(*pair), truncation=truncation)]
        (encoded,) = tokenizer.tokenize(calls)
        assert isinstance(encoded, TokenizedTexts)
        short, *long = (read_tokens(directory, item.ids) for item in encoded.items)
        assert short == "[CLS] the good : film is it [SEP]"
        assert long == [expected] * 2
        assert encoded.truncated == 2
    assert tokenizer.lookups == (6, 3)


def test_joined_pairs_have_their_instruction_and_equal_tokens(directory: Path) -> None:
    template = PairTemplate(instruction="the", before_first=" ", before_second=": ", end=" it")
    tokenizer = CachingTokenizer(directory, 9, pair_template=template)
    sent = call(("good", "film"), ("good", "film", "bad"))
    joined = tokenizer.join_pairs(sent)
    assert joined.texts == ("the good: film it", "bad good: film it")
    before, after = (tokenizer.tokenize([each])[0] for each in (sent, joined))
    assert isinstance(before, TokenizedTexts)
    assert isinstance(after, TokenizedTexts)
    for left, right in zip(before.items, after.items, strict=True):
        assert left.ids.tolist() == right.ids.tolist()
    assert CachingTokenizer(directory, 9).join_pairs(sent) is sent
