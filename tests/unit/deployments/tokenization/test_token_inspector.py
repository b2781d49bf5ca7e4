from __future__ import annotations

from pathlib import Path

import pytest

from deployments.errors import UnknownToken
from deployments.tokenization.encodings import open_tokenizer
from deployments.tokenization.vocabulary import TokenInspector
from tests.support.fakes import GilFreeTokenizer
from tests.support.tiny_encoders import tiny_tokenizer


@pytest.fixture(scope="module")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> TokenInspector:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(directory)
    return TokenInspector(open_tokenizer(directory))


def test_tokens_returns_offsets_and_special_tokens(inspector: TokenInspector) -> None:
    text = "the é 😀 night"
    (tokens,) = inspector.tokens([text], special=True)
    assert len(tokens.ids) == len(tokens.offsets) == 6
    assert tokens.special == {0: "[CLS]", 5: "[SEP]"}
    inner = [text[start:stop] for start, stop in tokens.offsets[1:-1]]
    assert inner == ["the", "é", "😀", "night"]


def test_tokens_of_several_texts_are_not_padded(inspector: TokenInspector) -> None:
    short, long = inspector.tokens(["a", "good film " * 50], special=False)
    assert (len(short.ids), len(long.ids)) == (1, 100)
    assert short.special == long.special == {}


def test_texts_reverses_tokens(inspector: TokenInspector) -> None:
    (tokens,) = inspector.tokens(["good film"], special=True)
    ids = tokens.ids.tolist()
    assert inspector.texts([ids], skip_special=True) == ("good film",)
    assert inspector.texts([ids, ids[1:2]], skip_special=False) == ("[CLS] good film [SEP]", "good")


def test_trimmed_texts_keep_special_tokens_between_the_ends(inspector: TokenInspector) -> None:
    (tokens,) = inspector.tokens(["good [MASK] film"], special=True)
    start, *inner, end = tokens.ids.tolist()
    sequences = [[start, *inner, end], inner, [start, *inner], [*inner, end], [start, start, end]]
    (padding,) = inspector.tokens(["[PAD]"], special=False)[0].ids.tolist()
    sequences += [[start, *inner, end, padding, padding], [padding, start, *inner, end]]
    texts = inspector.texts(sequences, skip_special=False, trim_special=True)
    assert texts == (*["good [MASK] film"] * 4, "[CLS]", *["good [MASK] film"] * 2)


def test_texts_rejects_ids_beyond_the_vocabulary(inspector: TokenInspector) -> None:
    with pytest.raises(UnknownToken, match="the maximum is") as raised:
        inspector.texts([[5], [10**12]], skip_special=True)
    last = int(raised.value.message.rpartition(" ")[2])
    assert inspector.texts([[last]], skip_special=True)[0]
    with pytest.raises(UnknownToken):
        inspector.texts([[last + 1]], skip_special=True)


def test_tokens_and_texts_do_not_hold_the_gil(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    inspector = TokenInspector(GilFreeTokenizer(open_tokenizer(tmp_path)))
    (tokens,) = inspector.tokens(["good film " * 50], special=False)
    (text,) = inspector.texts([tokens.ids.tolist()], skip_special=True)
    assert text.split() == ["good", "film"] * 50
