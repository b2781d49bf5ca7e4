from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from deployments.errors import InputTooLong
from deployments.messages import Call, Text, Truncation, Windowing
from deployments.tokenization.encodings import open_tokenizer
from deployments.tokenization.tokenizer import CachingTokenizer, TokenizedTexts
from deployments.tokenization.windows import MAX_WINDOWS, TokenWindow, WindowTokenizer
from tests.support.fakes import GilFreeTokenizer, far_deadline
from tests.support.tiny_encoders import tiny_tokenizer

MAX_TOKENS = 12  # ten words between [CLS] and [SEP]
LETTERS = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
WHOLE, SPECIAL = Windowing(), -1


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(path)
    return path


@pytest.fixture
def tokenizer(directory: Path) -> WindowTokenizer:
    return WindowTokenizer(directory, MAX_TOKENS)


def windows(
    tokenizer: WindowTokenizer,
    text: Text,
    windowing: Windowing,
    truncation: Truncation = Truncation.REFUSE,
) -> list[TokenWindow]:
    result, _ = tokenizer.windows(text, 0, windowing, truncation)
    return result


def pieces(window: TokenWindow, text: str, segment: int = 0) -> list[str]:
    """Return the parts of `text` that the tokens of a segment cover."""
    _, layout = window
    return [text[start:end] for start, end in layout.offsets[layout.segments == segment]]


def read_tokens(window: TokenWindow, directory: Path) -> str:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return " ".join(tokenizer.id_to_token(i) for i in window[0].ids)


def test_short_text_is_one_window_with_its_layout(
    tokenizer: WindowTokenizer, directory: Path
) -> None:
    (window,), truncated = tokenizer.windows("The filmy city", 3, WHOLE, Truncation.REFUSE)
    item, layout = window
    assert read_tokens(window, directory) == "[CLS] the film ##y city [SEP]"
    assert layout.text == 3
    assert layout.offsets.tolist() == [[0, 0], [0, 3], [4, 8], [8, 9], [10, 14], [0, 0]]
    assert layout.segments.tolist() == [SPECIAL, 0, 0, 0, 0, SPECIAL]
    assert layout.words.tolist() == [SPECIAL, 0, 1, 1, 2, SPECIAL]
    assert item.second_segment_start == len(item.ids)
    assert [array.dtype for array in (layout.offsets, layout.segments, layout.words)] == [
        np.int32,
        np.int8,
        np.int32,
    ]
    assert truncated is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("café film", ["café", "film"]),
        ("cafe\u0301 film", ["cafe", "film"]),  # the combining accent is dropped
        ("👩‍🚀 film", ["👩‍🚀", "film"]),
        ("日本film", ["日", "本", "film"]),
        ("  film\n\tcity", ["film", "city"]),
        ("the [SEP] film", ["the", "[SEP]", "film"]),  # [SEP] counts as part of the text
    ],
)
def test_offsets_are_characters_of_the_original_text(
    text: str, expected: list[str], tokenizer: WindowTokenizer
) -> None:
    (window,) = windows(tokenizer, text, WHOLE)
    words: dict[int, str] = {}
    _, layout = window
    parts = layout.segments == 0
    for word, piece in zip(layout.words[parts], pieces(window, text), strict=True):
        words[int(word)] = words.get(int(word), "") + piece
    assert list(words.values()) == expected


def test_text_without_tokens_is_a_window_of_special_tokens(tokenizer: WindowTokenizer) -> None:
    (window,) = windows(tokenizer, " ", Windowing(stride=2))
    assert window[1].segments.tolist() == [SPECIAL, SPECIAL]


@pytest.mark.parametrize("stride", range(6))
@pytest.mark.parametrize("count", [10, 11, 12, 19, 20, 21, 26])
def test_windows_cover_the_text_and_overlap_by_the_stride(
    count: int, stride: int, tokenizer: WindowTokenizer, directory: Path
) -> None:
    text = " ".join(LETTERS.split()[:count])
    result = windows(tokenizer, text, Windowing(stride=stride))
    parts = [pieces(window, text) for window in result]
    assert parts[0][:1] == ["a"]
    for before, after in pairwise(parts):
        assert len(before) == MAX_TOKENS - 2, "only the last window may be short"
        assert after[:stride] == before[len(before) - stride :]
    assert parts[0] + [piece for after in parts[1:] for piece in after[stride:]] == text.split()
    assert all(len(after) > stride for after in parts[1:]), "every window has new tokens"
    assert all(read_tokens(w, directory).startswith("[CLS] ") for w in result)
    assert all(read_tokens(w, directory).endswith(" [SEP]") for w in result)


def test_stride_is_at_most_half_of_a_window(tokenizer: WindowTokenizer) -> None:
    half = windows(tokenizer, LETTERS, Windowing(stride=5))
    above = windows(tokenizer, LETTERS, Windowing(stride=9))
    assert [w[0].ids.tolist() for w in above] == [w[0].ids.tolist() for w in half]


def test_word_numbers_count_over_the_whole_text(tokenizer: WindowTokenizer) -> None:
    _, (_, layout), *_ = windows(tokenizer, LETTERS, Windowing(stride=2))
    assert layout.words.tolist() == [SPECIAL, *range(8, 18), SPECIAL]


@pytest.mark.parametrize(
    ("tokens", "max_tokens"), [(None, MAX_TOKENS), (7, 7), (MAX_TOKENS + 9, MAX_TOKENS)]
)
def test_window_tokens_may_be_smaller_than_max_tokens_but_not_larger(
    tokens: int | None, max_tokens: int, tokenizer: WindowTokenizer
) -> None:
    result = windows(tokenizer, LETTERS, Windowing(tokens=tokens, stride=1))
    assert max(len(item.ids) for item, _ in result) == max_tokens


def test_too_long_text_error_suggests_a_stride(tokenizer: WindowTokenizer) -> None:
    assert len(windows(tokenizer, LETTERS[:19], WHOLE)) == 1, "ten words fit"
    with pytest.raises(InputTooLong, match="has 13 tokens; the maximum is 12") as raised:
        windows(tokenizer, LETTERS[:21], WHOLE)
    assert "stride" in raised.value.message


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [(Truncation.KEEP_START, "abcdefghij"), (Truncation.KEEP_END, "qrstuvwxyz")],
)
def test_truncation_keeps_its_side_with_original_offsets(
    truncation: Truncation, expected: str, tokenizer: WindowTokenizer
) -> None:
    (window,), truncated = tokenizer.windows(LETTERS, 0, WHOLE, truncation)
    assert "".join(pieces(window, LETTERS)) == expected
    assert truncated is True


def test_windows_take_precedence_over_truncation(tokenizer: WindowTokenizer) -> None:
    result, truncated = tokenizer.windows(LETTERS, 0, Windowing(stride=0), Truncation.KEEP_START)
    assert len(result) == 3
    assert truncated is False


@pytest.mark.parametrize("truncation", [Truncation.KEEP_START, Truncation.KEEP_END])
def test_limits_of_one_text_do_not_affect_the_next(
    truncation: Truncation, tokenizer: WindowTokenizer
) -> None:
    before = windows(tokenizer, LETTERS, Windowing(stride=3))
    tokenizer.windows(LETTERS, 0, Windowing(tokens=5), truncation)
    after = windows(tokenizer, LETTERS, Windowing(stride=3))
    assert [w[0].ids.tolist() for w in after] == [w[0].ids.tolist() for w in before]


def test_windows_per_text_are_limited(directory: Path) -> None:
    # Windows of two words overlap by one, so every word after the first adds a window.
    tokenizer = WindowTokenizer(directory, 4)
    windowing = Windowing(stride=1)
    longest = " ".join(["good"] * (MAX_WINDOWS + 1))
    assert len(windows(tokenizer, longest, windowing)) == MAX_WINDOWS
    with pytest.raises(InputTooLong, match=f"needs {MAX_WINDOWS + 1} windows of 4"):
        windows(tokenizer, longest + " good", windowing)


@pytest.mark.parametrize("stride", range(4))
@pytest.mark.parametrize("count", [7, 8, 14, 26])
def test_pair_windows_split_the_second_text(
    count: int, stride: int, tokenizer: WindowTokenizer, directory: Path
) -> None:
    first, second = "good film", " ".join(LETTERS.split()[:count])
    result = windows(tokenizer, (first, second), Windowing(stride=stride))
    parts = [pieces(window, second, segment=1) for window in result]
    assert parts[0] + [piece for after in parts[1:] for piece in after[stride:]] == second.split()
    for window, piece in zip(result, parts, strict=True):
        item, _ = window
        assert read_tokens(window, directory) == f"[CLS] good film [SEP] {' '.join(piece)} [SEP]"
        assert item.second_segment_start == 4
        assert pieces(window, first) == ["good", "film"]


def test_first_text_of_a_pair_is_truncated_to_first_tokens(
    tokenizer: WindowTokenizer, directory: Path
) -> None:
    pair = ("good filmy bad", LETTERS)
    result, truncated = tokenizer.windows(
        pair, 0, Windowing(stride=2, first_tokens=2), Truncation.REFUSE
    )
    assert all(
        read_tokens(window, directory).startswith("[CLS] good film [SEP] ") for window in result
    )
    assert truncated is True
    (whole,), truncated = tokenizer.windows(
        ("good filmy", "a"), 0, Windowing(first_tokens=3), Truncation.REFUSE
    )
    assert read_tokens(whole, directory) == "[CLS] good film ##y [SEP] a [SEP]"
    assert truncated is False


@pytest.mark.parametrize(("words", "fits"), [(7, True), (8, False), (12, False)])
def test_pair_without_space_for_the_second_text_is_rejected(
    words: int, fits: bool, tokenizer: WindowTokenizer
) -> None:
    pair = (" ".join(["good"] * words), LETTERS)
    if fits:
        parts = [
            pieces(w, LETTERS, segment=1) for w in windows(tokenizer, pair, Windowing(stride=1))
        ]
        assert parts == [list(LETTERS.replace(" ", "")[i : i + 2]) for i in range(25)]
    else:
        with pytest.raises(InputTooLong, match="has no space next to its first segment"):
            windows(tokenizer, pair, Windowing(stride=1))


def test_texts_are_encoded_without_the_gil(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "deployments.tokenization.windows.open_tokenizer",
        lambda directory: GilFreeTokenizer(open_tokenizer(directory)),
    )
    tokenizer = WindowTokenizer(directory, MAX_TOKENS)
    assert len(windows(tokenizer, LETTERS, Windowing(stride=1))) > 1
    assert len(windows(tokenizer, LETTERS, WHOLE, Truncation.KEEP_START)) == 1
    pair = ("good film", LETTERS)
    assert len(windows(tokenizer, pair, Windowing(stride=1, first_tokens=1))) > 1


def call(*texts: Text, windowing: Windowing | None) -> Call:
    fields = tuple(f"inputs[{i}]" for i in range(len(texts)))
    return Call(texts, fields, None, Truncation.REFUSE, far_deadline(), windowing)


def test_windowed_and_plain_calls_can_be_mixed(directory: Path) -> None:
    plain, windowed, refused, last = CachingTokenizer(directory, MAX_TOKENS).tokenize(
        [
            call("good", "film", windowing=None),
            call("the", LETTERS, "city", windowing=Windowing(stride=0)),
            call("good", LETTERS, windowing=WHOLE),
            call("night", windowing=None),
        ]
    )
    assert isinstance(plain, TokenizedTexts)
    assert isinstance(windowed, TokenizedTexts)
    assert isinstance(last, TokenizedTexts)
    assert (len(plain.items), plain.token_offsets) == (2, ())
    assert [layout.text for layout in windowed.token_offsets] == [0, 1, 1, 1, 2]
    assert len(windowed.items) == 5
    assert isinstance(refused, InputTooLong)
    assert refused.field == "inputs[1]"
    assert refused.message.startswith("`inputs[1]` has 28 tokens")
    assert len(last.items[0].ids) == 3
