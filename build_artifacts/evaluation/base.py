"""Base types of evaluations, and tokenization of examples, truncated to the model's maximum."""

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

from build_artifacts.checkpoints.metadata import CheckpointMetadata, ProblemType
from build_artifacts.checkpoints.sentences import Similarity
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.pair_template import PairTemplate
from deployments.artifacts.types import TruncationSide
from deployments.errors import BadSetting, EngineFailed, ServeError
from deployments.messages import Call, Text, TokenizedItem, Truncation
from deployments.tokenization.encodings import open_tokenizer
from deployments.tokenization.tokenizer import CachingTokenizer

E = TypeVar("E")

Output = NDArray[np.float32]  # output of an engine for one item; ModelHead defines the shape
ReducedOutput = NDArray[np.float32]  # the part of one output that the score needs


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    """Properties of a model that its examples need: tokenization, labels and similarity."""

    directory: Path  # holds tokenizer.json
    max_tokens: int  # longest item, special tokens included
    truncation_side: TruncationSide = "right"  # side that a longer text loses
    labels: tuple[str, ...] = ()
    problem_type: ProblemType | None = None
    prompt: str = ""  # prefix of every sentence for an embedding model
    similarity: Similarity = "cosine"  # measure for two embedding vectors
    default_dimensions: int | None = None  # length to which the model truncates them; None: not
    normalize: bool = False  # the model normalizes them before
    pair_template: PairTemplate | None = None
    mask_token: int | None = None

    @classmethod
    def of(cls, directory: Path, model: CheckpointMetadata | ArtifactManifest) -> EvaluatedModel:
        """Return the properties of a checkpoint or of an artifact in `directory`."""
        return cls(
            directory=directory,
            max_tokens=model.max_tokens,
            truncation_side=model.truncation_side,
            labels=model.labels,
            problem_type=model.problem_type,
            prompt=dict(model.prompts).get(model.default_prompt or "", ""),
            similarity=model.similarity,
            default_dimensions=model.default_dimensions,
            normalize=model.normalize,
            pair_template=model.pair_template,
            mask_token=model.mask_token,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSampling:
    """Subset of a file's examples. Equal limits and seeds select equal examples of a file."""

    limit: int | None = None  # maximum number of pairs, texts, queries or questions; None: all
    seed: int = 0

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise BadSetting(f"the limit of examples is {self.limit}; the minimum is 1")

    def sample(self, examples: Sequence[E]) -> list[E]:
        """Select at most `limit` examples; keep the order of the file."""
        if self.limit is None or self.limit >= len(examples):
            return list(examples)
        selected = random.Random(self.seed).sample(range(len(examples)), self.limit)
        return [examples[i] for i in sorted(selected)]


class Evaluation(ABC):
    """The examples of one file for one task.

    `items` are the inputs of the engine, which may run them in any order. `metric` names the score
    that the accuracy gate uses.
    """

    def __init__(self, items: Sequence[TokenizedItem], metric: str) -> None:
        self.items = items
        self.metric = metric

    def score(self, outputs: Sequence[Output]) -> dict[str, float]:
        """Return every metric by name; `outputs[i]` belongs to `items[i]`.

        Raises EngineFailed like `reduce_output`.
        """
        return self.score_reduced(
            [self.reduce_output(i, output) for i, output in enumerate(outputs)]
        )

    def reduce_output(self, index: int, output: Output) -> ReducedOutput:
        """Copy the part of the output for `items[index]` that `score_reduced` needs.

        Raises EngineFailed if a value is NaN or infinite.
        """
        if not np.isfinite(output).all():
            raise EngineFailed("an output is not a finite number")
        return self._reduce(index, output)

    @abstractmethod
    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        """Return every metric by name from the reduced output of each item."""

    @abstractmethod
    def _reduce(self, index: int, output: Output) -> ReducedOutput: ...

    def metric_drop(self, reference: Mapping[str, float], scores: Mapping[str, float]) -> float:
        """Return the loss of `metric` from `reference` to `scores`.

        The unit is points (hundredths of the metric); for perplexity, percent of the reference. The
        loss is negative if `scores` is better. It is infinite if it cannot be computed, for example
        because one of the values is NaN.
        """
        drop = self._drop(reference[self.metric], scores[self.metric])
        # Comparisons with NaN are false, so a limit could accept NaN. Infinity exceeds every limit.
        return math.inf if math.isnan(drop) else drop

    def find_violations(
        self, reference: Mapping[str, float], scores: Mapping[str, float], *, max_drop: float
    ) -> tuple[str, ...]:
        """Return a description of a loss above `max_drop`, or an empty tuple.

        `max_drop` has the unit of `metric_drop`.
        """
        drop = self.metric_drop(reference, scores)
        if drop <= max_drop:
            return ()
        return (f"{self.metric} {scores[self.metric]:.4f}, {self._format_drop(drop)}",)

    def _drop(self, reference: float, score: float) -> float:
        return 100 * (reference - score)

    def _format_drop(self, drop: float) -> str:
        return f"{drop:.2f} points below the reference"


def tokenize_texts(model: EvaluatedModel, texts: Sequence[Text]) -> list[TokenizedItem]:
    """Tokenize each text or pair of texts as the server does.

    Raises ServeError if the texts cannot be tokenized.
    """
    call = Call(
        texts=tuple(texts),
        fields=tuple(f"examples[{i}]" for i in range(len(texts))),
        options=None,
        truncation=Truncation.remove(model.truncation_side),
        deadline_s=float("inf"),
    )
    tokenizer = CachingTokenizer(
        model.directory, model.max_tokens, pair_template=model.pair_template
    )
    (tokenized,) = tokenizer.tokenize([call])
    if isinstance(tokenized, ServeError):
        raise tokenized
    return tokenized.items


def open_truncating_tokenizer(model: EvaluatedModel) -> Tokenizer:
    """Open the tokenizer as the server does, and let it truncate to `model.max_tokens`.

    Its encodings state special tokens, words and offsets; the items of `tokenize_texts` do not.
    """
    tokenizer = open_tokenizer(model.directory)
    tokenizer.enable_truncation(model.max_tokens, direction=model.truncation_side)
    return tokenizer
