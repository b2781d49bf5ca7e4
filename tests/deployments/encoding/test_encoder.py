from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from deployments.encoding.encoder import ENTRY_OVERHEAD_BYTES, Encoded, Encoder, TokenCache
from deployments.errors import InputTooLong
from deployments.messages import Call, Truncation
from tests.builders import tiny_tokenizer
from tests.fakes import soon

MAX_TOKENS = 6  # four words between [CLS] and [SEP]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(path)
    return path


def call(*texts: str, truncation: Truncation = Truncation.REFUSE) -> Call:
    fields = tuple(f"inputs[{i}]" for i in range(len(texts)))
    return Call(texts, fields, None, truncation, soon())


def words(directory: Path, ids: np.ndarray) -> str:
    return Tokenizer.from_file(str(directory / "tokenizer.json")).decode(
        ids.tolist(), skip_special_tokens=False
    )


def test_texts_become_ids_with_special_tokens(directory: Path) -> None:
    (encoded,) = Encoder(directory, MAX_TOKENS).encode([call("good film", "the")])
    assert isinstance(encoded, Encoded)
    assert [words(directory, ids) for ids in encoded.ids] == [
        "[CLS] good film [SEP]",
        "[CLS] the [SEP]",
    ]
    assert all(ids.dtype == np.int32 for ids in encoded.ids)
    assert encoded.truncated == 0


def test_a_text_at_the_limit_fits_and_one_token_more_does_not(directory: Path) -> None:
    encoder = Encoder(directory, MAX_TOKENS)
    fits, too_long = encoder.encode([call("good " * 4), call("the", "good " * 5)])
    assert isinstance(fits, Encoded)
    assert len(fits.ids[0]) == MAX_TOKENS
    assert isinstance(too_long, InputTooLong)
    assert too_long.field == "inputs[1]"
    assert "7 tokens" in too_long.message
    assert "at most 6" in too_long.message


def test_a_text_too_long_does_not_disturb_its_neighbours(directory: Path) -> None:
    encoder = Encoder(directory, MAX_TOKENS)
    before, refused, after = encoder.encode([call("good"), call("bad " * 9), call("film")])
    assert isinstance(refused, InputTooLong)
    assert words(directory, before.ids[0]) == "[CLS] good [SEP]"
    assert words(directory, after.ids[0]) == "[CLS] film [SEP]"


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
    (encoded,) = Encoder(directory, MAX_TOKENS).encode([call(text, "the", truncation=truncation)])
    assert words(directory, encoded.ids[0]) == kept
    assert encoded.truncated == 1


def test_a_remembered_text_is_cut_for_one_and_refused_to_another(directory: Path) -> None:
    encoder = Encoder(directory, MAX_TOKENS, cache_bytes=10_000)
    text = "good " * 9
    for _ in range(2):
        cut, refused = encoder.encode([call(text, truncation=Truncation.KEEP_START), call(text)])
        assert len(cut.ids[0]) == MAX_TOKENS
        assert isinstance(refused, InputTooLong)
    assert encoder.count(text) == 11


def test_an_encoding_from_memory_equals_a_fresh_one(directory: Path) -> None:
    remembering = Encoder(directory, MAX_TOKENS, cache_bytes=10_000)
    forgetful = Encoder(directory, MAX_TOKENS)
    for text in ("good film", "GOOD film", "good film", " ", "日本", "good film"):
        (remembered,), (fresh,) = remembering.encode([call(text)]), forgetful.encode([call(text)])
        assert remembered.ids[0].tolist() == fresh.ids[0].tolist()


def test_limits_written_in_the_tokenizer_file_do_not_count(directory: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (encoded,) = Encoder(tmp_path, MAX_TOKENS).encode([call("the good film")])
    assert words(directory, encoded.ids[0]) == "[CLS] the good film [SEP]"


def test_remembered_bytes_never_exceed_the_bound() -> None:
    ids = np.zeros(5, dtype=np.int32)
    size = 4 * len("text 0") + ids.nbytes + ENTRY_OVERHEAD_BYTES
    cache = TokenCache(3 * size)
    for i in range(5):
        cache.put(f"text {i}", ids)
        cache.get("text 0")  # used all the time, so it stays
    assert cache.bytes == 3 * size
    assert [i for i in range(5) if cache.get(f"text {i}") is not None] == [0, 3, 4]
    cache.resize(size)
    assert cache.bytes == size
    cache.resize(0)
    assert cache.bytes == 0
