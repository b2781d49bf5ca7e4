"""Evaluation of token-classification: predicted entities compared with tagged words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from build_artifacts.evaluation.base import (
    EvaluatedModel,
    Evaluation,
    ExampleSampling,
    Output,
    ReducedOutput,
    open_truncating_tokenizer,
)
from build_artifacts.evaluation.files import FileLocation, Record, read_objects
from build_artifacts.evaluation.labels import LabelIndex
from build_artifacts.evaluation.metrics import accuracy, f1
from deployments.messages import TokenizedItem
from deployments.tokenization.encodings import build_item

OUTSIDE = "O"


class Entity(NamedTuple):
    """A labeled span of words; `end` is exclusive."""

    kind: str
    start: int
    end: int


class _Tag(NamedTuple):
    mark: str  # B, I, E or S
    kind: str


def extract_entities(tags: Sequence[str]) -> set[Entity]:
    """Extract the entities of BIO, BIOES or IO tags by the lenient CoNLL rules.

    A word with the mark I or E continues the entity of the previous word if both have the same
    kind. An entity never continues after E or S. Any other word except `O` starts an entity. An I
    after `O` or after another kind starts an entity, as in the default mode of seqeval.
    """
    entities: set[Entity] = set()
    start, previous = 0, None
    for index, tag in enumerate([*tags, OUTSIDE]):
        current = _parse_tag(tag)
        if previous is not None and not _is_continued(previous, current):
            entities.add(Entity(previous.kind, start, index))
            previous = None
        if previous is None:
            start = index
        previous = current
    return entities


def _parse_tag(tag: str) -> _Tag | None:
    if tag == OUTSIDE:
        return None
    mark, dash, kind = tag.partition("-")
    if mark in ("B", "I", "E", "S"):
        return _Tag(mark, kind)
    # An IO tag such as `PER` has no mark. A dash in an IO tag is part of the name.
    return _Tag("I", mark + dash + kind)


def _is_continued(previous: _Tag, current: _Tag | None) -> bool:
    if current is None or previous.mark in ("E", "S"):
        return False
    return current.mark in ("I", "E") and current.kind == previous.kind


EXPECTED = "JSON lines with `tokens` (words) and `tags` (one per word, labels of the model)"


@dataclass(frozen=True, slots=True)
class TaggedWords:
    """The words of a sentence and the label id of each word."""

    words: tuple[str, ...]
    tags: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AlignedTags:
    """First token and label id of each word of an item, without truncated words."""

    tokens: tuple[int, ...]  # index of each word's first token
    tags: tuple[int, ...]


def load_token_classification(
    path: Path, model: EvaluatedModel, sampling: ExampleSampling
) -> Evaluation:
    """Load one item per sentence that has tokens. Raises BadEvaluationData for an unusable file."""
    location = FileLocation(path, EXPECTED)
    labels = LabelIndex(model.labels)
    sentences = sampling.sample(
        [_parse_sentence(record, labels) for record in read_objects(location)]
    )
    tokenizer = open_truncating_tokenizer(model)
    encodings = tokenizer.encode_batch(
        [_space_words(tokenizer, sentence.words) for sentence in sentences], is_pretokenized=True
    )
    aligned = [_align(e, s) for e, s in zip(encodings, sentences, strict=True)]
    usable = [i for i, tags in enumerate(aligned) if tags.tokens]
    if not usable:
        raise location.data_error("no sentence has a token other than special tokens", "tokens")
    items = [build_item(encodings[i], pair=False) for i in usable]
    return TokenClassificationEvaluation(items, [aligned[i] for i in usable], model.labels)


def _parse_sentence(record: Record, labels: LabelIndex) -> TaggedWords:
    words, tags = record.texts("tokens"), record.require_list("tags")
    if len(words) != len(tags):
        raise record.data_error(f"{len(tags)} tags for {len(words)} tokens", "tags")
    ids = [labels.index(tag, record, f"tags[{i}]") for i, tag in enumerate(tags)]
    return TaggedWords(tuple(words), tuple(ids))


def _space_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[str]:
    """Add a space to each word except the first if the tokenizer requires it.

    Byte-level tokenizers recognize a word by the space before it. Words from a list have no space.
    """
    probe = ["a", "a"]
    joined = tokenizer.encode(" ".join(probe)).ids
    if tokenizer.encode(probe, is_pretokenized=True).ids == joined:
        return list(words)
    return [words[0], *(f" {word}" for word in words[1:])]


def _align(encoding: Encoding, sentence: TaggedWords) -> AlignedTags:
    firsts: dict[int, int] = {}
    for token, word in enumerate(encoding.word_ids):
        if word is not None:
            firsts.setdefault(word, token)
    return AlignedTags(tuple(firsts.values()), tuple(sentence.tags[word] for word in firsts))


class TokenClassificationEvaluation(Evaluation):
    """Evaluation by `entity_f1`. The label of a word is the prediction for its first token."""

    def __init__(
        self,
        items: Sequence[TokenizedItem],
        aligned: Sequence[AlignedTags],
        labels: tuple[str, ...],
    ) -> None:
        super().__init__(items, "entity_f1")
        self._aligned = aligned
        self._labels = labels

    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        """Return `entity_f1` and `token_accuracy`; an entity must match in kind, start and end."""
        hits = predicted = expected = 0
        for row, sentence in zip(reduced, self._aligned, strict=True):
            actual = extract_entities([self._labels[int(label)] for label in row])
            tagged = extract_entities([self._labels[label] for label in sentence.tags])
            hits += len(actual & tagged)
            predicted += len(actual)
            expected += len(tagged)
        expected_tags = np.concatenate([sentence.tags for sentence in self._aligned])
        return {
            "entity_f1": f1(hits, predicted, expected),
            "token_accuracy": accuracy(np.concatenate(reduced), expected_tags),
        }

    def _reduce(self, index: int, output: Output) -> ReducedOutput:
        best: ReducedOutput = (
            output[list(self._aligned[index].tokens)].argmax(axis=1).astype(np.float32)
        )
        return best
