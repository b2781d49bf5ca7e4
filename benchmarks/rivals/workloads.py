"""Workloads of the benchmark. Every server gets the same texts in the same order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.errors import BenchmarkError

TextRequest = tuple[str, ...]  # the texts of one request

REQUESTS = 2_048  # number of requests of a workload; the load repeats them
LIST_SIZE = 32  # texts per request of the workload `lists`
PARAGRAPH_TOKENS, LONG_PARAGRAPH_TOKENS, DOCUMENT_TOKENS = 75, 128, 512
# Percent of each length in the workload `mixed`: sentences, paragraphs of 75 tokens, paragraphs of
# 128 tokens, documents.
MIXED_WEIGHTS = (60, 20, 15, 5)
PROMPT_SENTENCES = 3
MAX_GENERATION_CONNECTIONS = 8  # KV slots of the default config; more requests would only wait

GENERATION = "generation"


@dataclass(frozen=True, slots=True)
class TextWorkload:
    """Requests of a workload. `tokens` is the mean per text, including special tokens."""

    name: str
    requests: tuple[TextRequest, ...]
    tokens: float
    max_connections: int | None = None  # maximum number to measure; None: no limit

    @property
    def texts_per_request(self) -> int:
        return len(self.requests[0])

    @property
    def is_generation(self) -> bool:
        return self.name == GENERATION


@dataclass(frozen=True, slots=True)
class TextSource:
    """Shuffled sentences, and texts of given lengths joined from them.

    `max_tokens` is the limit of the model. No text of `join_to` exceeds it, so that servers do not
    truncate these texts.
    """

    sentences: Sequence[str]
    count_tokens: Callable[[str], int]  # counts tokens, including special tokens
    max_tokens: int
    rng: random.Random

    def sample_sentences(self) -> Iterator[str]:
        """Yield the sentences in order, in an endless cycle."""
        if not self.sentences:
            raise BenchmarkError("there are no sentences", hint="name a data set with --data DIR")
        while True:
            yield from self.sentences

    def join_to(self, tokens: int) -> Iterator[str]:
        """Yield texts of random sentences with at most `tokens` tokens, and at most `max_tokens`.

        A text ends before the first sentence that does not fit. Raises BenchmarkError if every
        sentence alone is too long.
        """
        limit = min(tokens, self.max_tokens)
        fitting = [text for text in self.sentences if self.count_tokens(text) <= limit]
        if not fitting:
            raise BenchmarkError(
                f"no sentence has at most {limit} tokens", hint="name a data set with --data DIR"
            )
        while True:
            joined = [self.rng.choice(fitting)]
            total = self.count_tokens(joined[0])
            while True:
                sentence = self.rng.choice(fitting)
                # `total` is an upper bound, because each count includes special tokens.
                total += self.count_tokens(sentence)
                if total > limit:
                    break
                joined.append(sentence)
            yield " ".join(joined)

    def mix(self) -> Iterator[str]:
        """Yield texts whose lengths are drawn with the weights MIXED_WEIGHTS."""
        lengths = (
            self.sample_sentences(),
            self.join_to(PARAGRAPH_TOKENS),
            self.join_to(LONG_PARAGRAPH_TOKENS),
            self.join_to(DOCUMENT_TOKENS),
        )
        while True:
            (texts,) = self.rng.choices(lengths, MIXED_WEIGHTS)
            yield next(texts)

    def prompts(self) -> Iterator[str]:
        """Yield prompts of PROMPT_SENTENCES sentences for generation."""
        while True:
            yield " ".join(self.rng.choice(self.sentences) for _ in range(PROMPT_SENTENCES))


# Name of a workload -> function that yields its texts.
WORKLOADS: Mapping[str, Callable[[TextSource], Iterator[str]]] = {
    "sentences": TextSource.sample_sentences,
    "paragraphs-75": lambda source: source.join_to(PARAGRAPH_TOKENS),
    "paragraphs-128": lambda source: source.join_to(LONG_PARAGRAPH_TOKENS),
    "documents": lambda source: source.join_to(DOCUMENT_TOKENS),
    "mixed": TextSource.mix,
    "lists": TextSource.sample_sentences,
    GENERATION: TextSource.prompts,
}


def build_workload(name: str, source: TextSource) -> TextWorkload:
    """Build the workload `name`, which is a key of WORKLOADS."""
    size = LIST_SIZE if name == "lists" else 1
    texts = WORKLOADS[name](source)
    requests = tuple(tuple(next(texts) for _ in range(size)) for _ in range(REQUESTS))
    counts = [source.count_tokens(text) for request in requests for text in request]
    max_connections = MAX_GENERATION_CONNECTIONS if name == GENERATION else None
    return TextWorkload(name, requests, sum(counts) / len(counts), max_connections)
