from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from deployments.errors import InputTooLong
from deployments.messages import Call, Text, Truncation, Windowing
from deployments.tokenization.tokenizer import CachingTokenizer, TokenizedTexts
from deployments.tokenization.windows import MAX_WINDOWS, TokenWindow, WindowTokenizer
from tests.support.builders import tiny_tokenizer
from tests.support.fakes import far_deadline

MOST = 12  # ten words between [CLS] and [SEP]
LETTERS = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
WHOLE, SPECIAL = Windowing(), -1


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(path)
    return path


@pytest.fixture
def encoder(directory: Path) -> WindowTokenizer:
    return WindowTokenizer(directory, MOST)


def windows(
    encoder: WindowTokenizer,
    text: Text,
    windowing: Windowing,
    truncation: Truncation = Truncation.REFUSE,
) -> list[TokenWindow]:
    found, _ = encoder.windows(text, 0, windowing, truncation)
    return found


def pieces(window: TokenWindow, text: str, segment: int = 0) -> list[str]:
    """What the window's tokens of that segment stand for."""
    _, layout = window
    return [text[start:end] for start, end in layout.offsets[layout.segments == segment]]


def read(window: TokenWindow, directory: Path) -> str:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return " ".join(tokenizer.id_to_token(i) for i in window[0].ids)


def test_a_text_that_fits_is_one_window_with_its_layout(
    encoder: WindowTokenizer, directory: Path
) -> None:
    (window,), cut = encoder.windows("The filmy city", 3, WHOLE, Truncation.REFUSE)
    item, layout = window
    assert read(window, directory) == "[CLS] the film ##y city [SEP]"
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
    assert cut is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("café film", ["café", "film"]),
        ("cafe\u0301 film", ["cafe", "film"]),  # the accent, a character of its own, is dropped
        ("👩‍🚀 film", ["👩‍🚀", "film"]),
        ("日本film", ["日", "本", "film"]),
        ("  film\n\tcity", ["film", "city"]),
        ("the [SEP] film", ["the", "[SEP]", "film"]),  # written, not put there by a template
    ],
)
def test_offsets_are_characters_of_the_text_as_it_came(
    text: str, expected: list[str], encoder: WindowTokenizer
) -> None:
    (window,) = windows(encoder, text, WHOLE)
    words: dict[int, str] = {}
    _, layout = window
    own = layout.segments == 0
    for word, piece in zip(layout.words[own], pieces(window, text), strict=True):
        words[int(word)] = words.get(int(word), "") + piece
    assert list(words.values()) == expected


def test_a_text_without_tokens_is_a_window_of_special_ones(encoder: WindowTokenizer) -> None:
    (window,) = windows(encoder, " ", Windowing(stride=2))
    assert window[1].segments.tolist() == [SPECIAL, SPECIAL]


@pytest.mark.parametrize("stride", range(6))
@pytest.mark.parametrize("count", [10, 11, 12, 19, 20, 21, 26])
def test_windows_cover_a_text_and_share_the_stride(
    count: int, stride: int, encoder: WindowTokenizer, directory: Path
) -> None:
    text = " ".join(LETTERS.split()[:count])
    found = windows(encoder, text, Windowing(stride=stride))
    own = [pieces(window, text) for window in found]
    assert own[0][:1] == ["a"]
    for before, after in pairwise(own):
        assert len(before) == MOST - 2, "only the last window may be short"
        assert after[:stride] == before[len(before) - stride :]
    assert own[0] + [piece for after in own[1:] for piece in after[stride:]] == text.split()
    assert all(len(after) > stride for after in own[1:]), "every window has something new"
    assert all(read(w, directory).startswith("[CLS] ") for w in found)
    assert all(read(w, directory).endswith(" [SEP]") for w in found)


def test_a_stride_is_at_most_half_of_a_window(encoder: WindowTokenizer) -> None:
    half = windows(encoder, LETTERS, Windowing(stride=5))
    most = windows(encoder, LETTERS, Windowing(stride=9))
    assert [w[0].ids.tolist() for w in most] == [w[0].ids.tolist() for w in half]


def test_windows_number_the_words_of_the_whole_text(encoder: WindowTokenizer) -> None:
    _, (_, layout), *_ = windows(encoder, LETTERS, Windowing(stride=2))
    assert layout.words.tolist() == [SPECIAL, *range(8, 18), SPECIAL]


@pytest.mark.parametrize(("tokens", "most"), [(None, MOST), (7, 7), (MOST + 9, MOST)])
def test_a_task_may_ask_for_smaller_windows_but_not_for_larger(
    tokens: int | None, most: int, encoder: WindowTokenizer
) -> None:
    found = windows(encoder, LETTERS, Windowing(tokens=tokens, stride=1))
    assert max(len(item.ids) for item, _ in found) == most


def test_a_text_too_long_is_refused_and_hears_of_the_stride(encoder: WindowTokenizer) -> None:
    assert len(windows(encoder, LETTERS[:19], WHOLE)) == 1, "ten words fit"
    with pytest.raises(InputTooLong, match="has 13 tokens; the maximum is 12") as refusal:
        windows(encoder, LETTERS[:21], WHOLE)
    assert "stride" in refusal.value.message


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [(Truncation.KEEP_START, "abcdefghij"), (Truncation.KEEP_END, "qrstuvwxyz")],
)
def test_truncation_keeps_the_side_it_names_with_its_place_in_the_text(
    truncation: Truncation, kept: str, encoder: WindowTokenizer
) -> None:
    (window,), cut = encoder.windows(LETTERS, 0, WHOLE, truncation)
    assert "".join(pieces(window, LETTERS)) == kept
    assert cut is True


def test_windows_are_preferred_to_cutting(encoder: WindowTokenizer) -> None:
    found, cut = encoder.windows(LETTERS, 0, Windowing(stride=0), Truncation.KEEP_START)
    assert len(found) == 3
    assert cut is False


@pytest.mark.parametrize("truncation", [Truncation.KEEP_START, Truncation.KEEP_END])
def test_limits_of_one_text_do_not_outlive_it(
    truncation: Truncation, encoder: WindowTokenizer
) -> None:
    before = windows(encoder, LETTERS, Windowing(stride=3))
    encoder.windows(LETTERS, 0, Windowing(tokens=5), truncation)
    after = windows(encoder, LETTERS, Windowing(stride=3))
    assert [w[0].ids.tolist() for w in after] == [w[0].ids.tolist() for w in before]


def test_no_more_windows_are_made_than_a_request_may_ask_for(directory: Path) -> None:
    encoder = WindowTokenizer(directory, 4)  # two words, one of them shared: a window a word
    windowing = Windowing(stride=1)
    most = " ".join(["good"] * (MAX_WINDOWS + 1))
    assert len(windows(encoder, most, windowing)) == MAX_WINDOWS
    with pytest.raises(InputTooLong, match=f"needs {MAX_WINDOWS + 1} windows of 4"):
        windows(encoder, most + " good", windowing)


@pytest.mark.parametrize("stride", range(4))
@pytest.mark.parametrize("count", [7, 8, 14, 26])
def test_of_a_pair_the_second_text_has_windows_behind_the_first(
    count: int, stride: int, encoder: WindowTokenizer, directory: Path
) -> None:
    first, second = "good film", " ".join(LETTERS.split()[:count])
    found = windows(encoder, (first, second), Windowing(stride=stride))
    own = [pieces(window, second, segment=1) for window in found]
    assert own[0] + [piece for after in own[1:] for piece in after[stride:]] == second.split()
    for window, piece in zip(found, own, strict=True):
        item, _ = window
        assert read(window, directory) == f"[CLS] good film [SEP] {' '.join(piece)} [SEP]"
        assert item.second_segment_start == 4
        assert pieces(window, first) == ["good", "film"]


def test_the_first_of_a_pair_is_cut_to_the_tokens_it_may_have(
    encoder: WindowTokenizer, directory: Path
) -> None:
    pair = ("good filmy bad", LETTERS)
    found, cut = encoder.windows(pair, 0, Windowing(stride=2, first_tokens=2), Truncation.REFUSE)
    assert all(read(window, directory).startswith("[CLS] good film [SEP] ") for window in found)
    assert cut is True
    (whole,), cut = encoder.windows(
        ("good filmy", "a"), 0, Windowing(first_tokens=3), Truncation.REFUSE
    )
    assert read(whole, directory) == "[CLS] good film ##y [SEP] a [SEP]"
    assert cut is False


@pytest.mark.parametrize(("words", "fits"), [(7, True), (8, False), (12, False)])
def test_a_first_text_that_leaves_no_room_for_the_second_is_refused(
    words: int, fits: bool, encoder: WindowTokenizer
) -> None:
    pair = (" ".join(["good"] * words), LETTERS)
    if fits:
        own = [pieces(w, LETTERS, segment=1) for w in windows(encoder, pair, Windowing(stride=1))]
        assert own == [list(LETTERS.replace(" ", "")[i : i + 2]) for i in range(25)]
    else:
        with pytest.raises(InputTooLong, match="has no space next to its first segment"):
            windows(encoder, pair, Windowing(stride=1))


def call(*texts: Text, windowing: Windowing | None) -> Call:
    fields = tuple(f"inputs[{i}]" for i in range(len(texts)))
    return Call(texts, fields, None, Truncation.REFUSE, far_deadline(), windowing)


def test_calls_with_layouts_and_calls_without_go_together(directory: Path) -> None:
    plain, windowed, refused, last = CachingTokenizer(directory, MOST).tokenize(
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
