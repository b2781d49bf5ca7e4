from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.sentences import (
    SST2_NAME,
    STSB_NAME,
    LabeledText,
    generate_sentences,
    load_sentences,
    read_labeled_texts,
    read_scored_pairs,
)
from build_artifacts.evaluation.similarity import ScoredPair


def test_generated_sentences_are_a_function_of_the_seed() -> None:
    assert generate_sentences(50, seed=3) == generate_sentences(50, seed=3)
    assert generate_sentences(50, seed=3).texts != generate_sentences(50, seed=4).texts


def test_generated_sentences_match_the_lengths_of_stsb() -> None:
    # Every word is one token; the full stop and two special tokens add three.
    tokens = np.array([len(text.split()) + 3 for text in generate_sentences(2_758, seed=0).texts])
    assert 13.5 < tokens.mean() < 14.8
    assert 11 <= np.median(tokens) <= 13
    assert 28 <= np.percentile(tokens, 95) <= 33
    assert (tokens.min(), tokens.max()) >= (5, 30)
    assert tokens.max() <= 46


def test_load_sentences_keeps_the_file_order(tmp_path: Path) -> None:
    (tmp_path / STSB_NAME).write_text(
        'score\tsentence1\tsentence2\n2.5\tA "cat" sits.\tA dog.\n5.0\tOne.\tTwo.\n'
    )
    assert read_scored_pairs(tmp_path / STSB_NAME) == [
        ScoredPair('A "cat" sits.', "A dog.", 2.5),
        ScoredPair("One.", "Two.", 5.0),
    ]
    loaded = load_sentences(tmp_path, seed=0)
    assert loaded.texts == ('A "cat" sits.', "A dog.", "One.", "Two.")
    assert loaded.origin == STSB_NAME


def test_read_labeled_texts_parses_labels(tmp_path: Path) -> None:
    (tmp_path / SST2_NAME).write_text("label\tsentence\n1\tgood\n0\tbad\n")
    assert read_labeled_texts(tmp_path / SST2_NAME) == [
        LabeledText("good", 1),
        LabeledText("bad", 0),
    ]


def test_load_sentences_rejects_a_directory_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="No such file") as caught:
        load_sentences(tmp_path, seed=0)
    assert "--data" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("label\ttext\n", "line 1: 2 columns, neither a header nor an example"),
        ("label\tsentence\n1\tgood\textra\n", "line 2: 3 columns, not 2"),
        ("label\tsentence\n1\tgood\nx\tbad\n", "line 3, `label`: `x` is not a number"),
    ],
)
def test_read_labeled_texts_names_the_damaged_line(
    tmp_path: Path, text: str, complaint: str
) -> None:
    (tmp_path / SST2_NAME).write_text(text)
    with pytest.raises(BenchmarkError, match=complaint):
        read_labeled_texts(tmp_path / SST2_NAME)
