from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deployments.tokenization.vocabulary import TokenVocabulary
from tests.support.builders import tiny_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TokenVocabulary:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(path)
    return TokenVocabulary(path)


def wordpiece() -> Tokenizer:
    words = {"<unk>": 0, "film": 1, "##y": 2}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def unigram() -> Tokenizer:
    pieces = [("<s>", 0.0), ("<unk>", 0.0), ("▁film", -1.0), ("y", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def unigram_that_knows_all() -> Tokenizer:
    return Tokenizer(models.Unigram([("film", -1.0), ("y", -2.0)]))


def bytes_bpe() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "unknown_id", "marks"),
    [
        (wordpiece, 0, True),
        (unigram, 1, False),
        (unigram_that_knows_all, None, False),
        (bytes_bpe, None, False),
    ],
)
def test_a_vocabulary_says_what_it_calls_unknown_and_how_it_spells_parts_of_words(
    kind: Callable[[], Tokenizer], unknown_id: int | None, marks: bool, tmp_path: Path
) -> None:
    kind().save(str(tmp_path / "tokenizer.json"))
    vocabulary = TokenVocabulary(tmp_path)
    assert vocabulary.unknown_id == unknown_id
    assert vocabulary.has_continuation_prefix is marks


@pytest.mark.parametrize(
    ("kind", "tokens", "text"),
    [
        (wordpiece, ["film", "##y", "film"], "filmy film"),
        (unigram, ["▁film", "y", "▁film"], "filmy film"),
        (bytes_bpe, ["f", "Ã", "©", "Ġ", "!"], "fé !"),
        (unigram_that_knows_all, ["film", "y"], "film y"),  # it has no decoder
    ],
)
def test_tokens_are_joined_as_the_tokenizer_writes(
    kind: Callable[[], Tokenizer], tokens: list[str], text: str, tmp_path: Path
) -> None:
    kind().save(str(tmp_path / "tokenizer.json"))
    assert TokenVocabulary(tmp_path).join(tokens) == text


def test_ids_become_tokens_and_text(tiny: TokenVocabulary) -> None:
    ids = [tiny.first_token_id(token) for token in ("[CLS]", "film", "##y", "[SEP]")]
    known = [i for i in ids if i is not None]
    assert len(known) == 4
    assert [tiny.token(i) for i in known] == ["[CLS]", "film", "##y", "[SEP]"]
    assert tiny.token(100_000) == ""
    assert tiny.text(known) == "[CLS] filmy [SEP]"
    assert tiny.text(known, skip_special=True) == "filmy"


@pytest.mark.parametrize(
    ("text", "token"),
    [("film", "film"), ("##y", "##y"), ("Film", "film"), ("filmy", "film"), ("日", "[UNK]")],
)
def test_a_word_stands_for_its_token_or_its_first_piece(
    text: str, token: str, tiny: TokenVocabulary
) -> None:
    found = tiny.first_token_id(text)
    assert found is not None
    assert tiny.token(found) == token


def test_a_text_without_tokens_stands_for_none(tiny: TokenVocabulary) -> None:
    assert tiny.first_token_id(" ") is None
