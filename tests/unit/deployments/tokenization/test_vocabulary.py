from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deployments.tokenization.vocabulary import TokenVocabulary
from tests.support.tiny_encoders import tiny_tokenizer


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


def unigram_without_unknown() -> Tokenizer:
    return Tokenizer(models.Unigram([("film", -1.0), ("y", -2.0)]))


def byte_level_bpe() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "unknown_id", "has_prefix"),
    [
        (wordpiece, 0, True),
        (unigram, 1, False),
        (unigram_without_unknown, None, False),
        (byte_level_bpe, None, False),
    ],
)
def test_vocabulary_detects_unknown_token_and_continuation_prefix(
    kind: Callable[[], Tokenizer], unknown_id: int | None, has_prefix: bool, tmp_path: Path
) -> None:
    kind().save(str(tmp_path / "tokenizer.json"))
    vocabulary = TokenVocabulary(tmp_path)
    assert vocabulary.unknown_id == unknown_id
    assert vocabulary.has_continuation_prefix is has_prefix


@pytest.mark.parametrize(
    ("kind", "tokens", "text"),
    [
        (wordpiece, ["film", "##y", "film"], "filmy film"),
        (unigram, ["▁film", "y", "▁film"], "filmy film"),
        (byte_level_bpe, ["f", "Ã", "©", "Ġ", "!"], "fé !"),
        (unigram_without_unknown, ["film", "y"], "film y"),  # this tokenizer has no decoder
    ],
)
def test_join_matches_the_tokenizer(
    kind: Callable[[], Tokenizer], tokens: list[str], text: str, tmp_path: Path
) -> None:
    kind().save(str(tmp_path / "tokenizer.json"))
    assert TokenVocabulary(tmp_path).join(tokens) == text


def test_vocabulary_maps_ids_to_tokens_and_text(tiny: TokenVocabulary) -> None:
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
def test_first_token_id_returns_the_token_or_its_first_piece(
    text: str, token: str, tiny: TokenVocabulary
) -> None:
    token_id = tiny.first_token_id(text)
    assert token_id is not None
    assert tiny.token(token_id) == token


def test_first_token_id_without_tokens_is_none(tiny: TokenVocabulary) -> None:
    assert tiny.first_token_id(" ") is None
