"""Right answers: embeddings by fp32 torch, completions by the artifact in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import uvloop
from numpy.typing import NDArray

from benchmarks.common.agreement import to_vector
from benchmarks.common.local_model import LocalModel, open_torch
from benchmarks.generation.in_process import InProcessGenerator
from benchmarks.generation.streams import StreamRequest, run_streams
from benchmarks.rivals.apis import NEW_TOKENS
from benchmarks.rivals.materials import Materials
from build_artifacts.decoders.generation_report import common_prefix_length
from build_artifacts.types import Tokens
from deployments.host.machine import usable_cores
from deployments.tokenization.encodings import open_tokenizer

ComputedAnswer = TypeVar("ComputedAnswer")


class CachedAnswers(Generic[ComputedAnswer]):
    """Answers to texts, computed once per text."""

    def __init__(self, compute: Callable[[Sequence[str]], Iterable[ComputedAnswer]]) -> None:
        self._compute = compute
        self._known: dict[str, ComputedAnswer] = {}

    def get(self, texts: Sequence[str]) -> list[ComputedAnswer]:
        """Return one answer per text. Compute those to new texts only."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            self._known.update(zip(new, self._compute(new), strict=True))
        return [self._known[text] for text in texts]


EmbedTexts = Callable[[Sequence[str]], NDArray[np.float32]]  # returns vectors [texts, width]


class ReferenceEmbeddings:
    """Embeddings by the checkpoint in fp32 torch."""

    def __init__(self, embed: EmbedTexts) -> None:
        self._embeddings: CachedAnswers[NDArray[np.float32]] = CachedAnswers(embed)

    @classmethod
    def open(cls, model: LocalModel, materials: Materials) -> ReferenceEmbeddings:
        """Open the checkpoint of `model` in torch. Raises ServeError if it is unusable."""
        threads = usable_cores()
        source = str(materials.checkpoint)
        engine = open_torch(source, model.manifest, materials.scratch, threads)

        def embed(texts: Sequence[str]) -> NDArray[np.float32]:
            values = model.unbatched_values(texts, threads=threads, engine=engine)
            return np.stack([to_vector(value) for value in values])

        return cls(embed)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings [texts, width]."""
        return np.stack(self._embeddings.get(texts))


class ReferenceCompletions:
    """Greedy completions by the artifact that Hundredfold serves."""

    def __init__(
        self,
        complete: Callable[[Sequence[str]], Sequence[str]],
        tokenize: Callable[[str], Tokens],
    ) -> None:
        self._completions = CachedAnswers(complete)
        self._tokenize = tokenize

    @classmethod
    def open(cls, model: LocalModel) -> ReferenceCompletions:
        """Return completions by `model`, which is open only while it computes new ones."""
        tokenizer = open_tokenizer(model.directory)

        def complete(prompts: Sequence[str]) -> list[str]:
            requests = [
                StreamRequest(tuple(tokenizer.encode(prompt).ids), NEW_TOKENS, may_end_early=True)
                for prompt in prompts
            ]
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                events, threads = runner.get_loop(), usable_cores()
                generator = InProcessGenerator(model, kv_slots=1, threads=threads, events=events)
                with closing(generator):
                    answers = runner.run(run_streams(generator, requests, clients=1))
            return [answer.text for answer in answers]

        def tokenize(text: str) -> Tokens:
            return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

        return cls(complete, tokenize)

    def complete(self, prompts: Sequence[str]) -> list[str]:
        return self._completions.get(prompts)

    def leading_share(self, text: str, expected: str) -> float:
        """Return the share of the tokens of the longer text before the first difference.

        White space around the texts does not count, because some detokenizers drop it.
        """
        left, right = (self._tokenize(each.strip()) for each in (text, expected))
        longest = max(len(left), len(right))
        return common_prefix_length(left, right) / longest if longest else 1.0


@dataclass(frozen=True, slots=True)
class References:
    """Right answers of both kinds. `completions` is None without a generative model."""

    embeddings: ReferenceEmbeddings
    completions: ReferenceCompletions | None = None
