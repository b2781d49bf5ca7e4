from __future__ import annotations

import random

import pytest

from deployments.generation.stops import StopStrings


def shown(
    pieces: list[str], stop: tuple[str, ...], *, keep: bool = False
) -> tuple[list[str], bool]:
    """Return the text emitted for each piece, up to a stop string or the end."""
    stops = StopStrings(stop, include_stop_string=keep)
    texts = []
    for piece in pieces:
        text, is_over = stops.push(piece)
        texts.append(text)
        if is_over:
            return texts, True
    return [*texts, stops.flush()], False


@pytest.mark.parametrize(
    ("pieces", "stop", "texts"),
    [
        (["one", " two"], ("two",), ["one", " "]),
        (["on", "e t", "w", "o three"], ("two",), ["on", "e ", "", ""]),
        (["a\n", "\nb"], ("\n\n",), ["a", ""]),
        (["xaab"], ("aab",), ["x"]),
        (["x", "a", "a", "a", "b"], ("aab",), ["x", "", "", "a", ""]),
        (["stop"], ("stop",), [""]),
        (
            ["b", "ca"],
            ("abc", "bca", "a"),
            ["", ""],
        ),  # two stop strings end at the same character: the longest applies
        (["abcd"], ("abcd", "c"), ["ab"]),  # the stop string that ends first applies
        (["ab", "cd"], ("c", "abcd"), ["", "ab"]),
        (["né", "e 🙂", "!"], ("🙂!",), ["né", "e ", ""]),
    ],
)
def test_text_ends_before_the_first_stop_string(
    pieces: list[str], stop: tuple[str, ...], texts: list[str]
) -> None:
    assert shown(pieces, stop) == (texts, True)


@pytest.mark.parametrize(
    ("pieces", "stop", "texts"),
    [
        (["on", "e t", "w", "o three"], ("two",), ["on", "e t", "w", "o"]),
        (["stop it"], ("stop",), ["stop"]),
        (["abc"], ("c", "abc"), ["abc"]),
    ],
)
def test_included_stop_string_is_emitted_without_delay(
    pieces: list[str], stop: tuple[str, ...], texts: list[str]
) -> None:
    assert shown(pieces, stop, keep=True) == (texts, True)


@pytest.mark.parametrize(
    ("pieces", "stop", "texts"),
    [
        (["a t", "w", "itch"], ("two",), ["a ", "", "twitch", ""]),
        (["a t", "w"], ("two",), ["a ", "", "tw"]),
        (["aaaa"], ("aab", "aaaab"), ["", "aaaa"]),
        (["any", "thing"], (), ["any", "thing", ""]),
        (["any", "thing"], ("",), ["any", "thing", ""]),
        (["any", "", "thing"], ("gx",), ["any", "", "thin", "g"]),
    ],
)
def test_text_without_stop_string_is_complete(
    pieces: list[str], stop: tuple[str, ...], texts: list[str]
) -> None:
    assert shown(pieces, stop) == (texts, False)


@pytest.mark.parametrize("keep", [False, True])
def test_stop_string_that_ended_the_text_is_known(keep: bool) -> None:
    stops = StopStrings(("bc", "abc", "c"), include_stop_string=keep)
    for piece in ("xa", "b"):
        stops.push(piece)
        assert stops.found == ""
    stops.push("c, and more")
    assert stops.found == "abc"


def test_text_after_a_stop_string_is_dropped() -> None:
    stops = StopStrings(("b",), include_stop_string=False)
    assert stops.push("ab") == ("a", True)
    assert stops.flush() == ""
    assert stops.push("more") == ("", True)


def ended(text: str, stop: tuple[str, ...], *, keep: bool) -> tuple[str, bool]:
    """Return the expected text and whether a stop string ended it. Test every prefix."""
    for end in range(1, len(text) + 1):
        lengths = [len(string) for string in stop if text[:end].endswith(string)]
        if lengths:
            return text[: end if keep else end - max(lengths)], True
    return text, False


@pytest.mark.parametrize("keep", [False, True])
def test_result_is_independent_of_chunking(keep: bool) -> None:
    draw = random.Random(3)
    outcomes = set()
    for _ in range(3000):
        text = "".join(draw.choices("abc", k=draw.randrange(1, 25)))
        stop = tuple(
            "".join(draw.choices("abc", k=draw.randrange(1, 7)))
            for _ in range(draw.randrange(1, 4))
        )
        ends = sorted(draw.sample(range(len(text) + 1), k=min(len(text), draw.randrange(1, 6))))
        pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
        texts, is_over = shown(pieces, stop, keep=keep)
        assert ("".join(texts), is_over) == ended(text, stop, keep=keep), (
            pieces,
            stop,
        )
        outcomes.add(is_over)
    assert outcomes == {True, False}


def test_only_possible_prefixes_are_held_back() -> None:
    draw = random.Random(4)
    for _ in range(500):
        stop = tuple("".join(draw.choices("ab", k=draw.randrange(2, 7))) for _ in range(2))
        stops, text, emitted = StopStrings(stop, include_stop_string=False), "", ""
        while True:
            piece = draw.choice("ab")
            text += piece
            added, is_over = stops.push(piece)
            if is_over:
                break
            emitted += added
            held = text[len(emitted) :]
            begun = [n for n in range(1, 7) if any(s[:n] == text[-n:] != s for s in stop)]
            assert len(held) == max(begun, default=0), (text, stop)


def test_long_text_takes_linear_time() -> None:
    stops = StopStrings(("a" * 500 + "b",), include_stop_string=False)
    texts = [
        stops.push("a")[0] for _ in range(50_000)
    ]  # takes minutes if each push rescans the text
    assert "".join(texts) == "a" * 49_500
    assert stops.flush() == "a" * 500
