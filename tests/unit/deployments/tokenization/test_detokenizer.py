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


def marking_words() -> Tokenizer:
    """As sentencepiece writes: `▁` begins a word, and bytes stand for what has no token."""
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


def pieces_of(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [detokenizer.push(token) for token in ids]


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("kind", [byte_level, marking_words])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_put_together_are_the_text(text: str, kind: Callable[[], Tokenizer]) -> None:
    tokenizer = kind()
    ids = tokenizer.encode(text).ids
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == decoded(tokenizer, ids)
    assert decoded(tokenizer, ids).lstrip() == text.lstrip()
    assert sum("\ufffd" in piece for piece in pieces) == text.count("\ufffd")


@pytest.mark.parametrize("kind", [byte_level, marking_words])
def test_a_character_comes_whole_with_its_last_byte(kind: Callable[[], Tokenizer]) -> None:
    tokenizer = kind()
    bytes_of_smile = [byte_token(tokenizer, byte) for byte in "🙂".encode()]
    assert pieces_of(tokenizer, bytes_of_smile) == ["", "", "", "🙂"]


@pytest.mark.parametrize("kind", [byte_level, marking_words])
def test_bytes_that_are_no_character_show_at_once_and_do_not_stop_the_text(
    kind: Callable[[], Tokenizer],
) -> None:
    tokenizer = kind()
    ids = [byte_token(tokenizer, byte) for byte in b"\xff\xe6ok\xf0\x9f\x99"]
    assert pieces_of(tokenizer, ids) == ["\ufffd", "", "\ufffdo", "k", "", "", ""]


@pytest.mark.parametrize("kind", [byte_level, marking_words])
def test_bytes_that_are_never_characters_cost_no_more_the_more_there_are(
    kind: Callable[[], Tokenizer],
) -> None:
    tokenizer = kind()
    broken = byte_token(tokenizer, 0xFF)
    pieces = pieces_of(tokenizer, [broken] * 20_000)  # takes minutes where all are read each time
    assert set(pieces) == {"\ufffd"}


def test_a_byte_token_behind_a_whole_character_takes_nothing_back() -> None:
    tokenizer = marking_words()
    ids = [byte_token(tokenizer, byte) for byte in "é".encode() + b"\xff" + "é".encode()]
    assert pieces_of(tokenizer, ids) == ["", "é", "\ufffd", "", "é"]
    assert "é" not in decoded(tokenizer, ids)  # what it says of all of them at once


def test_a_word_behind_an_unfinished_character_shows_that_it_stays_so() -> None:
    tokenizer = marking_words()
    begun, word = byte_token(tokenizer, 0xE6), tokenizer.token_to_id("▁ab")
    assert pieces_of(tokenizer, [word, begun, word, word]) == ["ab", "", "\ufffd ab", " ab"]


def test_any_bytes_come_out_as_the_tokenizer_decodes_them() -> None:
    tokenizer = byte_level()
    draw = random.Random(5)
    # Continuation and leading bytes often, so that there are whole, broken and cut characters.
    likely = [byte_token(tokenizer, byte) for byte in [*b"a \n", *"é日🙂".encode(), 0xFF, 0xC0]]
    every = list(tokenizer.get_vocab().values())
    for _ in range(3000):
        ids = [draw.choice(likely if draw.random() < 0.8 else every) for _ in range(20)]
        text = "".join(pieces_of(tokenizer, ids))
        whole = decoded(tokenizer, ids)
        # The tokenizer marks an unfinished character, and both bytes of a begun surrogate.
        assert whole in (text, text + "\ufffd", text + 2 * "\ufffd"), ids


def test_any_tokens_of_marked_words_come_out_as_decoded() -> None:
    tokenizer = marking_words()
    words = [tokenizer.token_to_id(piece) for piece in ("▁", "a", "b", "▁a", "▁ab", "é", "</s>")]
    smile = [byte_token(tokenizer, byte) for byte in "🙂".encode()]
    draw = random.Random(6)
    for _ in range(2000):
        ids = []
        for _ in range(draw.randrange(1, 12)):
            ids += smile if draw.random() < 0.2 else [draw.choice(words)]
        assert "".join(pieces_of(tokenizer, ids)) == decoded(tokenizer, ids), ids


@pytest.mark.parametrize(
    ("kind", "ids", "pieces"),
    [
        (wordpiece, [1, 2, 3, 4], ["film", "y", " good", "."]),
        (wordpiece, [3, 5, 1], ["good", "n't", " film"]),
        (unigram, [1, 2, 1, 3, 3, 1], ["film", "y", " film", " ", " ", " film"]),
        (without_decoder, [0, 1], ["film", " y"]),
    ],
)
def test_words_are_joined_as_the_tokenizer_joins_them(
    kind: Callable[[], Tokenizer], ids: list[int], pieces: list[str]
) -> None:
    tokenizer = kind()
    assert "".join(pieces) == decoded(tokenizer, ids)
    assert pieces_of(tokenizer, ids) == pieces


def test_special_and_unknown_tokens_add_nothing_and_part_no_character() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|end|>")
    first, second = (byte_token(tokenizer, byte) for byte in "é".encode())
    unknown = 10 * tokenizer.get_vocab_size()
    assert pieces_of(tokenizer, [end, first, end, unknown, second, end]) == [
        "",
        "",
        "",
        "",
        "é",
        "",
    ]


def test_added_tokens_that_are_not_special_are_text() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["日本", "two words"])
    ids = [tokenizer.token_to_id("日本"), tokenizer.token_to_id("two words")]
    assert pieces_of(tokenizer, ids) == ["日本", "two words"]


def test_a_first_word_begins_with_a_space_only_behind_a_prompt() -> None:
    tokenizer = marking_words()
    start, a, word = (tokenizer.token_to_id(piece) for piece in ("<s>", "a", "▁ab"))
    assert pieces_of(tokenizer, [word]) == ["ab"]
    assert pieces_of(tokenizer, [word], prompt=[start]) == ["ab"]
    assert pieces_of(tokenizer, [word], prompt=[start, a]) == [" ab"]
    assert pieces_of(tokenizer, [word], prompt=[a, start, start]) == [" ab"]


@pytest.mark.parametrize("kind", [byte_level, marking_words])
def test_a_prompt_may_end_inside_a_character(kind: Callable[[], Tokenizer]) -> None:
    tokenizer = kind()
    smile = [byte_token(tokenizer, byte) for byte in "🙂".encode()]
    assert pieces_of(tokenizer, smile[2:], prompt=smile[:2]) == ["", "🙂"]
    assert pieces_of(tokenizer, smile, prompt=smile * 9) == ["", "", "", "🙂"]


@pytest.mark.parametrize(
    ("kind", "token", "text"),
    [
        (byte_level, "Ġ", " "),
        (byte_level, "a", "a"),
        (byte_level, "Ã", "\ufffd"),
        (byte_level, "<|end|>", "<|end|>"),
        (marking_words, "▁ab", " ab"),
        (marking_words, "▁", " "),
        (marking_words, "b", "b"),
        (marking_words, "</s>", "</s>"),
        (wordpiece, "film", " film"),
        (wordpiece, "##y", "y"),
    ],
)
def test_a_token_alone_has_the_text_it_has_inside_of_one(
    kind: Callable[[], Tokenizer], token: str, text: str
) -> None:
    tokenizer = kind()
    assert token_text(tokenizer, tokenizer.token_to_id(token)) == text
