"""Examples to items: the tokenizer of a model, cutting at what the model reads."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from build_artifacts.checkpoints.metadata import ProblemType
from deployments.errors import BadSetting, EngineFailed, ServeError
from deployments.messages import Call, Text, TokenizedItem, Truncation
from deployments.tokenization.encodings import open_tokenizer
from deployments.tokenization.tokenizer import CachingTokenizer

E = TypeVar("E")

Output = NDArray[np.float32]  # what an engine answers to one item, shaped as ModelHead says
ReducedOutput = NDArray[np.float32]  # the few numbers of one answer that the score needs


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    """What the examples have to fit."""

    directory: Path  # holds tokenizer.json
    max_tokens: int  # longest item, special tokens included
    labels: tuple[str, ...] = ()
    problem_type: ProblemType | None = None
    prompt: str = ""  # stands before every sentence of an embedding model
    mask_token: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSampling:
    """How much of a file to use; equal seeds choose equal examples."""

    limit: int | None = None  # examples: pairs, texts, queries, questions
    seed: int = 0

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise BadSetting(f"no metric can be taken on {self.limit} examples")

    def of(self, examples: Sequence[E]) -> list[E]:
        """At most `limit` of the examples, in the file's order."""
        if self.limit is None or self.limit >= len(examples):
            return list(examples)
        chosen = random.Random(self.seed).sample(range(len(examples)), self.limit)
        return [examples[i] for i in sorted(chosen)]


class Evaluation(ABC):
    """The examples of one file for one task.

    `items` is what the engine is to answer, in no special order; `metric` is the name of the
    score that decides.
    """

    def __init__(self, items: Sequence[TokenizedItem], metric: str) -> None:
        self.items = items
        self.metric = metric

    def score(self, answers: Sequence[Output]) -> dict[str, float]:
        """Every metric by name; `answers[i]` answers `items[i]`. Raises EngineFailed as `keep`."""
        return self.score_reduced(
            [self.reduce_output(i, answer) for i, answer in enumerate(answers)]
        )

    def reduce_output(self, index: int, answer: Output) -> ReducedOutput:
        """What `score_reduced` needs of the answer to `items[index]`, in memory of its own.

        Raises EngineFailed when the answer is not made of finite numbers.
        """
        if not np.isfinite(answer).all():
            raise EngineFailed("an output is not a finite number")
        return self._reduce(index, answer)

    @abstractmethod
    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        """Every metric by name, from what was kept of the answer to each item."""

    @abstractmethod
    def _reduce(self, index: int, answer: Output) -> ReducedOutput: ...

    def metric_drop(self, reference: Mapping[str, float], scores: Mapping[str, float]) -> float:
        """How much worse `scores` is than `reference` by the leading metric.

        In points, hundredths of the metric; for perplexity, by how many percent it has grown.
        Negative when it is better; infinite when the two cannot be compared.
        """
        drop = self._drop(reference[self.metric], scores[self.metric])
        # No comparison with a limit holds for NaN, so it would pass every gate.
        return math.inf if math.isnan(drop) else drop

    def _drop(self, reference: float, score: float) -> float:
        return 100 * (reference - score)


def tokenize_texts(model: EvaluatedModel, texts: Sequence[Text]) -> list[TokenizedItem]:
    """One item per text or pair of texts, by the server's own encoder."""
    call = Call(
        texts=tuple(texts),
        fields=tuple(f"examples[{i}]" for i in range(len(texts))),
        options=None,
        truncation=Truncation.KEEP_START,
        deadline_s=float("inf"),
    )
    (encoded,) = CachingTokenizer(model.directory, model.max_tokens).tokenize([call])
    if isinstance(encoded, ServeError):
        raise encoded
    return encoded.items


def open_truncating_tokenizer(model: EvaluatedModel) -> Tokenizer:
    """The server's tokenizer, for offsets and words; cuts at what the model reads."""
    tokenizer = open_tokenizer(model.directory)
    tokenizer.enable_truncation(model.max_tokens)
    return tokenizer
