from __future__ import annotations

from pathlib import Path

import pytest

from deployments.errors import ArtifactError, UnknownToken
from deployments.tokenization.vocabulary import TokenInspector
from tests.support.builders import tiny_tokenizer


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> TokenInspector:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(directory)
    return TokenInspector(directory)


def test_columns_fit_the_text_and_special_tokens_are_spelled(table: TokenInspector) -> None:
    text = "the é 😀 night"
    (tokens,) = table.tokens([text], special=True)
    assert len(tokens.ids) == len(tokens.offsets) == 6
    assert tokens.special == {0: "[CLS]", 5: "[SEP]"}
    inner = [text[start:stop] for start, stop in tokens.offsets[1:-1]]
    assert inner == ["the", "é", "😀", "night"]


def test_neighbours_do_not_pad_each_other(table: TokenInspector) -> None:
    short, long = table.tokens(["a", "good film " * 50], special=False)
    assert (len(short.ids), len(long.ids)) == (1, 100)
    assert short.special == long.special == {}


def test_what_was_tokenized_reads_as_before(table: TokenInspector) -> None:
    (tokens,) = table.tokens(["good film"], special=True)
    ids = tokens.ids.tolist()
    assert table.texts([ids], skip_special=True) == ("good film",)
    assert table.texts([ids, ids[1:2]], skip_special=False) == ("[CLS] good film [SEP]", "good")


def test_the_last_token_is_known_and_the_next_is_not(table: TokenInspector) -> None:
    with pytest.raises(UnknownToken, match="the maximum is") as refused:
        table.texts([[5], [10**12]], skip_special=True)
    last = int(refused.value.message.rpartition(" ")[2])
    assert table.texts([[last]], skip_special=True)[0]
    with pytest.raises(UnknownToken):
        table.texts([[last + 1]], skip_special=True)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        TokenInspector(tmp_path)
