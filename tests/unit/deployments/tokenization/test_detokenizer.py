from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deployments.tokenization.detokenizer import Detokenizer, token_text
from tests.support.small_tokenizers import byte_level, byte_token

TEXTS = (
    "plain words, and more",
    " a space before",
    "emoji 🙂👩‍👩‍👧‍👦🇫🇷 and 日本語 中文 한국어",
    "combining e\u0301 n\u0303 and right to left שלום",
    "lines\n\n\tand tabs",
    "a literal \ufffd in the text",
)


def metaspace() -> Tokenizer:
    """Build a tokenizer like sentencepiece: `▁` starts a word; unknown characters become bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁ab", "▁b", "é"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁a", "b"), ("▁", "b")]
    model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    written = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*written, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    words = ["[UNK]", "film", "##y", "good", ".", "n't"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("▁film", -1.0), ("y", -2.0), ("▁", -3.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def without_decoder() -> Tokenizer:
    return Tokenizer(models.Unigram([("film", -1.0), ("y", -2.0)]))


def detokenize(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [detokenizer.push(token) for token in ids]


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("build", [byte_level, metaspace])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_concatenate_to_the_text(text: str, build: Callable[[], Tokenizer]) -> None:
    tokenizer = build()
    ids = tokenizer.encode(text).ids
    pieces = detokenize(tokenizer, ids)
    assert "".join(pieces) == decode(tokenizer, ids)
    assert decode(tokenizer, ids).lstrip() == text.lstrip()
    assert sum("\ufffd" in piece for piece in pieces) == text.count("\ufffd")


@pytest.mark.parametrize("build", [byte_level, metaspace])
def test_character_is_returned_with_its_last_byte(build: Callable[[], Tokenizer]) -> None:
    tokenizer = build()
    bytes_of_smile = [byte_token(tokenizer, byte) for byte in "🙂".encode()]
    assert detokenize(tokenizer, bytes_of_smile) == ["", "", "", "🙂"]


@pytest.mark.parametrize("build", [byte_level, metaspace])
def test_invalid_bytes_become_replacement_characters(
    build: Callable[[], Tokenizer],
) -> None:
    tokenizer = build()
    ids = [byte_token(tokenizer, byte) for byte in b"\xff\xe6ok\xf0\x9f\x99"]
    assert detokenize(tokenizer, ids) == ["\ufffd", "", "\ufffdo", "k", "", "", ""]


@pytest.mark.parametrize("build", [byte_level, metaspace])
def test_long_runs_of_invalid_bytes_take_linear_time(
    build: Callable[[], Tokenizer],
) -> None:
    tokenizer = build()
    broken = byte_token(tokenizer, 0xFF)
    pieces = detokenize(tokenizer, [broken] * 20_000)  # quadratic time would take minutes
    assert set(pieces) == {"\ufffd"}


def test_invalid_byte_after_a_character_keeps_the_character() -> None:
    tokenizer = metaspace()
    ids = [byte_token(tokenizer, byte) for byte in "é".encode() + b"\xff" + "é".encode()]
    assert detokenize(tokenizer, ids) == ["", "é", "\ufffd", "", "é"]
    assert "é" not in decode(tokenizer, ids)  # the tokenizer also replaces the valid bytes


def test_word_after_an_unfinished_character_adds_a_replacement() -> None:
    tokenizer = metaspace()
    unfinished, word = byte_token(tokenizer, 0xE6), tokenizer.token_to_id("▁ab")
    assert detokenize(tokenizer, [word, unfinished, word, word]) == ["ab", "", "\ufffd ab", " ab"]


def test_random_bytes_match_the_tokenizer() -> None:
    tokenizer = byte_level()
    rng = random.Random(5)
    # Frequent continuation and leading bytes give complete, broken and truncated characters.
    likely = [byte_token(tokenizer, byte) for byte in [*b"a \n", *"é日🙂".encode(), 0xFF, 0xC0]]
    every = list(tokenizer.get_vocab().values())
    for _ in range(3000):
        ids = [rng.choice(likely if rng.random() < 0.8 else every) for _ in range(20)]
        text = "".join(detokenize(tokenizer, ids))
        whole = decode(tokenizer, ids)
        # At the end, the tokenizer adds one U+FFFD for an unfinished character, or two for the two
        # bytes of an unfinished surrogate.
        assert whole in (text, text + "\ufffd", text + 2 * "\ufffd"), ids


def test_random_marked_words_match_the_tokenizer() -> None:
    tokenizer = metaspace()
    words = [tokenizer.token_to_id(piece) for piece in ("▁", "a", "b", "▁a", "▁ab", "é", "</s>")]
    smile = [byte_token(tokenizer, byte) for byte in "🙂".encode()]
    rng = random.Random(6)
    for _ in range(2000):
        ids = []
        for _ in range(rng.randrange(1, 12)):
            ids += smile if rng.random() < 0.2 else [rng.choice(words)]
        assert "".join(detokenize(tokenizer, ids)) == decode(tokenizer, ids), ids


@pytest.mark.parametrize(
    ("build", "ids", "pieces"),
    [
        (wordpiece, [1, 2, 3, 4], ["film", "y", " good", "."]),
        (wordpiece, [3, 5, 1], ["good", "n't", " film"]),
        (unigram, [1, 2, 1, 3, 3, 1], ["film", "y", " film", " ", " ", " film"]),
        (without_decoder, [0, 1], ["film", " y"]),
    ],
)
def test_words_are_joined_as_by_the_tokenizer(
    build: Callable[[], Tokenizer], ids: list[int], pieces: list[str]
) -> None:
    tokenizer = build()
    assert "".join(pieces) == decode(tokenizer, ids)
    assert detokenize(tokenizer, ids) == pieces


def test_special_and_unknown_tokens_do_not_split_a_character() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|end|>")
    first, second = (byte_token(tokenizer, byte) for byte in "é".encode())
    unknown = 10 * tokenizer.get_vocab_size()
    assert detokenize(tokenizer, [end, first, end, unknown, second, end]) == [
        "",
        "",
        "",
        "",
        "é",
        "",
    ]


def test_flush_ends_an_incomplete_character() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    first, second = (byte_token(tokenizer, byte) for byte in "é".encode())
    assert detokenizer.push(first) == ""
    assert detokenizer.is_within_character
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")
    assert not detokenizer.is_within_character
    assert detokenizer.push(second) == "\ufffd"


def test_added_tokens_are_text() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["日本", "two words"])
    ids = [tokenizer.token_to_id("日本"), tokenizer.token_to_id("two words")]
    assert detokenize(tokenizer, ids) == ["日本", "two words"]


def test_first_word_starts_with_a_space_only_after_a_prompt() -> None:
    tokenizer = metaspace()
    start, a, word = (tokenizer.token_to_id(piece) for piece in ("<s>", "a", "▁ab"))
    assert detokenize(tokenizer, [word]) == ["ab"]
    assert detokenize(tokenizer, [word], prompt=[start]) == ["ab"]
    assert detokenize(tokenizer, [word], prompt=[start, a]) == [" ab"]
    assert detokenize(tokenizer, [word], prompt=[a, start, start]) == [" ab"]


@pytest.mark.parametrize("build", [byte_level, metaspace])
def test_prompt_may_end_inside_a_character(build: Callable[[], Tokenizer]) -> None:
    tokenizer = build()
    smile = [byte_token(tokenizer, byte) for byte in "🙂".encode()]
    assert detokenize(tokenizer, smile[2:], prompt=smile[:2]) == ["", "🙂"]
    assert detokenize(tokenizer, smile, prompt=smile * 9) == ["", "", "", "🙂"]


@pytest.mark.parametrize(
    ("build", "token", "text"),
    [
        (byte_level, "Ġ", " "),
        (byte_level, "a", "a"),
        (byte_level, "Ã", "\ufffd"),
        (byte_level, "<|end|>", "<|end|>"),
        (metaspace, "▁ab", " ab"),
        (metaspace, "▁", " "),
        (metaspace, "b", "b"),
        (metaspace, "</s>", "</s>"),
        (wordpiece, "film", " film"),
        (wordpiece, "##y", "y"),
    ],
)
def test_token_text_equals_its_text_inside_a_sentence(
    build: Callable[[], Tokenizer], token: str, text: str
) -> None:
    tokenizer = build()
    assert token_text(tokenizer, tokenizer.token_to_id(token)) == text
