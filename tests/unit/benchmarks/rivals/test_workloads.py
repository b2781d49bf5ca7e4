from __future__ import annotations

import random

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.rivals.workloads import (
    GENERATION,
    LIST_SIZE,
    REQUESTS,
    WORKLOADS,
    TextSource,
    build_workload,
)

SENTENCES = tuple(" ".join(["word"] * n) + f" {n}" for n in range(1, 20))


def count_tokens(text: str) -> int:
    return len(text.split()) + 2  # [CLS] and [SEP]


def source(max_tokens: int = 512, seed: int = 0) -> TextSource:
    return TextSource(SENTENCES, count_tokens, max_tokens, random.Random(seed))


@pytest.mark.parametrize(
    ("name", "tokens"), [("paragraphs-75", 75), ("paragraphs-128", 128), ("documents", 512)]
)
def test_joined_texts_are_about_as_long_as_named(name: str, tokens: int) -> None:
    workload = build_workload(name, source())
    counts = [count_tokens(text) for (text,) in workload.requests]
    assert max(counts) <= tokens
    assert 0.7 * tokens < workload.tokens <= tokens


def test_no_text_exceeds_the_limit_of_the_model() -> None:
    for name in WORKLOADS:
        texts = [t for request in build_workload(name, source(64)).requests for t in request]
        if name != GENERATION:
            assert max(map(count_tokens, texts)) <= 64, name


@pytest.mark.parametrize("name", WORKLOADS)
def test_build_workload_is_a_function_of_the_seed(name: str) -> None:
    first, second = build_workload(name, source(seed=1)), build_workload(name, source(seed=1))
    assert first == second
    assert len(first.requests) == REQUESTS


def test_lists_have_32_sentences_each() -> None:
    workload = build_workload("lists", source())
    assert {len(request) for request in workload.requests} == {LIST_SIZE}
    assert set(workload.requests[0]) <= set(SENTENCES)


def test_mixed_contains_all_lengths() -> None:
    counts = [count_tokens(text) for (text,) in build_workload("mixed", source()).requests]
    short = sum(count <= 22 for count in counts) / len(counts)
    assert 0.5 < short < 0.7
    assert max(counts) > 400


def test_without_sentences_is_an_error() -> None:
    empty = TextSource((), count_tokens, 512, random.Random(0))
    with pytest.raises(BenchmarkError, match="there are no sentences"):
        build_workload("sentences", empty)


def test_sentences_above_the_limit_are_not_joined() -> None:
    texts = [text for (text,) in build_workload("documents", source(max_tokens=10)).requests]
    assert max(map(count_tokens, texts)) <= 10
    with pytest.raises(BenchmarkError, match="no sentence has at most 3 tokens"):
        build_workload("documents", source(max_tokens=3))
