from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from deployments.errors import ArtifactError
from deployments.messages import Truncation
from deployments.tokenization.encodings import (
    BPE_BYTES_PER_COMMA,
    BYTES_PER_COMMA,
    MIN_TOKENIZER_BYTES,
    UNIGRAM_BYTES_PER_COMMA,
    build_item,
    longest_first,
    measure_tokenizer,
    open_tokenizer,
    truncate_item,
)
from tests.support.tiny_encoders import WORDS, tiny_tokenizer

SIDES = {Truncation.KEEP_START: "right", Truncation.KEEP_END: "left"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(directory)
    return open_tokenizer(directory)


@pytest.mark.parametrize("content", [None, b"{}", b"\xff"])
def test_damaged_tokenizer_is_named_without_a_path(content: bytes | None, tmp_path: Path) -> None:
    directory = tmp_path / "tiny--model" / "0123456789ab"
    directory.mkdir(parents=True)
    if content is not None:
        (directory / "tokenizer.json").write_bytes(content)
    with pytest.raises(ArtifactError) as raised:
        open_tokenizer(directory)
    assert raised.value.message.startswith("tiny/model@0123456789ab: `tokenizer.json` is not a ")
    assert str(tmp_path) not in raised.value.message


@pytest.mark.parametrize("keep", SIDES)
def test_truncate_item_matches_the_library(
    keep: Truncation, tmp_path: Path, plain: Tokenizer
) -> None:
    tiny_tokenizer(tmp_path)
    truncating = open_tokenizer(tmp_path)
    rng = random.Random(7)
    for _ in range(2_000):
        max_tokens = rng.randint(4, 20)
        truncating.enable_truncation(max_tokens, direction=SIDES[keep], strategy="longest_first")
        first, second = (" ".join(rng.choices(WORDS, k=rng.randint(9, 25))) for _ in "ab")
        text = (first, second) if rng.random() < 0.7 else first
        (item,) = plain.encode_batch_fast([text])
        if len(item.ids) <= max_tokens:
            continue
        expected = build_item(
            truncating.encode(*((text,) if isinstance(text, str) else text)), pair=True
        )
        truncated = truncate_item(item, max_tokens, keep)
        assert (truncated.ids.tolist(), truncated.second_segment_start) == (
            expected.ids.tolist(),
            expected.second_segment_start,
        )


@pytest.mark.parametrize(
    ("first", "second", "room", "expected"),
    [
        (3, 4, 9, (3, 4)),
        (3, 90, 9, (3, 6)),
        (90, 3, 9, (6, 3)),
        (90, 91, 9, (4, 5)),
        (91, 90, 9, (5, 4)),
        (50, 0, 9, (9, 0)),
    ],
)
def test_longest_first_shortens_the_longer_segment(
    first: int, second: int, room: int, expected: tuple[int, int]
) -> None:
    assert longest_first(first, second, room) == expected


def test_truncate_item_of_long_segments_needs_little_memory(plain: Tokenizer) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (item,) = plain.encode_batch_fast([("good " * 20_000, "film " * 20_000)])
    assert len(truncate_item(item, 16, Truncation.KEEP_START).ids) == 16
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 200_000


@pytest.mark.parametrize("indented", [False, True])
def test_measured_memory_depends_on_entries_and_kind(indented: bool, tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(1_000)]
    kinds = {
        "few": models.WordPiece({word: i for i, word in enumerate(words[:100])}, unk_token="word0"),
        "many": models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="word0"),
        "bpe": models.BPE({word: i for i, word in enumerate(words)}, []),
        "unigram": models.Unigram([(word, -1.0) for word in words], unk_id=0),
    }
    sizes = {}
    for name, model in kinds.items():
        (tmp_path / name).mkdir()
        Tokenizer(model).save(str(tmp_path / name / "tokenizer.json"), pretty=indented)
        sizes[name] = measure_tokenizer(tmp_path / name) - MIN_TOKENIZER_BYTES
    assert sizes["many"] == pytest.approx(1_000 * BYTES_PER_COMMA, rel=0.05)
    assert sizes["few"] == pytest.approx(sizes["many"] / 10, rel=0.2)
    assert sizes["bpe"] == pytest.approx(1_000 * BPE_BYTES_PER_COMMA, rel=0.05)
    assert sizes["unigram"] == pytest.approx(2_000 * UNIGRAM_BYTES_PER_COMMA, rel=0.05)


def test_measuring_a_missing_tokenizer_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"`tokenizer.json` cannot be read"):
        measure_tokenizer(tmp_path)
