from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deployments.messages import Truncation
from deployments.tokenization.encodings import (
    build_item,
    longest_first,
    open_tokenizer,
    truncate_item,
)
from tests.support.builders import WORDS, tiny_tokenizer

SIDES = {Truncation.KEEP_START: "right", Truncation.KEEP_END: "left"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(directory)
    return open_tokenizer(directory)


@pytest.mark.parametrize("keep", SIDES)
def test_it_cuts_as_the_library_does(keep: Truncation, tmp_path: Path, plain: Tokenizer) -> None:
    tiny_tokenizer(tmp_path)
    cutting = open_tokenizer(tmp_path)
    chance = random.Random(7)
    for _ in range(2_000):
        most = chance.randint(4, 20)
        cutting.enable_truncation(most, direction=SIDES[keep], strategy="longest_first")
        first, second = (" ".join(chance.choices(WORDS, k=chance.randint(9, 25))) for _ in "ab")
        text = (first, second) if chance.random() < 0.7 else first
        (whole,) = plain.encode_batch_fast([text])
        if len(whole.ids) <= most:
            continue
        due = build_item(cutting.encode(*((text,) if isinstance(text, str) else text)), pair=True)
        found = truncate_item(whole, most, keep)
        assert (found.ids.tolist(), found.second_segment_start) == (
            due.ids.tolist(),
            due.second_segment_start,
        )


@pytest.mark.parametrize(
    ("first", "second", "room", "kept"),
    [
        (3, 4, 9, (3, 4)),
        (3, 90, 9, (3, 6)),
        (90, 3, 9, (6, 3)),
        (90, 91, 9, (4, 5)),
        (91, 90, 9, (5, 4)),
        (50, 0, 9, (9, 0)),
    ],
)
def test_the_longer_segment_loses_first(
    first: int, second: int, room: int, kept: tuple[int, int]
) -> None:
    assert longest_first(first, second, room) == kept


def test_two_long_segments_cost_no_more_than_their_length(plain: Tokenizer) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (whole,) = plain.encode_batch_fast([("good " * 20_000, "film " * 20_000)])
    assert len(truncate_item(whole, 16, Truncation.KEEP_START).ids) == 16
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 200_000
