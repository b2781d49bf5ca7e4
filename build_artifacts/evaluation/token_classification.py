"""token-classification: are the right entities found among the words?"""

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
from build_artifacts.evaluation.labels import ModelLabels
from build_artifacts.evaluation.metrics import accuracy, f1
from deployments.messages import TokenizedItem
from deployments.tokenization.encodings import build_item

OUTSIDE = "O"


class Entity(NamedTuple):
    """What a run of words is; `end` is the index after its last word."""

    kind: str
    start: int
    end: int


class _Tag(NamedTuple):
    mark: str  # B, I, E or S
    kind: str


def extract_entities(tags: Sequence[str]) -> set[Entity]:
    """The entities that tags in any of BIO, BIOES or IO describe, by the lenient CoNLL reading.

    A word continues the entity before it if it says so (I or E), is of the same kind and that
    entity has not ended (E or S); any other word but `O` starts one. So an I after nothing, or
    after another kind, is a start, as in seqeval's default mode.
    """
    found: set[Entity] = set()
    start, before = 0, None
    for place, tag in enumerate([*tags, OUTSIDE]):
        now = _parse(tag)
        if before is not None and not _continues(before, now):
            found.add(Entity(before.kind, start, place))
            before = None
        if before is None:
            start = place
        before = now
    return found


def _parse(tag: str) -> _Tag | None:
    if tag == OUTSIDE:
        return None
    mark, dash, kind = tag.partition("-")
    if mark in ("B", "I", "E", "S"):
        return _Tag(mark, kind)
    # IO without marks, such as `PER`; a dash is then part of the name.
    return _Tag("I", mark + dash + kind)


def _continues(before: _Tag, now: _Tag | None) -> bool:
    if now is None or before.mark in ("E", "S"):
        return False
    return now.mark in ("I", "E") and now.kind == before.kind


EXPECTED = "JSON lines with `tokens` (words) and `tags` (one per word, labels of the model)"


@dataclass(frozen=True, slots=True)
class TaggedWords:
    """A sentence in words, and the id of each word's label."""

    words: tuple[str, ...]
    tags: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AlignedTags:
    """Where the words of an item begin, and what they are; words that were cut off are not here."""

    tokens: tuple[int, ...]  # index of each word's first token
    tags: tuple[int, ...]


def load_token_classification(
    path: Path, model: EvaluatedModel, sampling: ExampleSampling
) -> Evaluation:
    """The sentences of the file, an item each. Raises BadEvaluationData."""
    place = FileLocation(path, EXPECTED)
    labels = ModelLabels(model.labels)
    sentences = sampling.of([_sentence(record, labels) for record in read_objects(place)])
    tokenizer = open_truncating_tokenizer(model)
    encodings = tokenizer.encode_batch(
        [_spaced(tokenizer, sentence.words) for sentence in sentences], is_pretokenized=True
    )
    aligned = [_align(e, s) for e, s in zip(encodings, sentences, strict=True)]
    chosen = [i for i, tags in enumerate(aligned) if tags.tokens]
    if not chosen:
        raise place.data_error("the tokenizer leaves nothing of any sentence", "tokens")
    items = [build_item(encodings[i], pair=False) for i in chosen]
    return TokenClassificationEvaluation(items, [aligned[i] for i in chosen], model.labels)


def _sentence(record: Record, labels: ModelLabels) -> TaggedWords:
    words, tags = record.texts("tokens"), record.require_list("tags")
    if len(words) != len(tags):
        raise record.data_error(f"{len(tags)} tags for {len(words)} tokens", "tags")
    ids = [labels.index(tag, record, f"tags[{i}]") for i, tag in enumerate(tags)]
    return TaggedWords(tuple(words), tuple(ids))


def _spaced(tokenizer: Tokenizer, words: Sequence[str]) -> list[str]:
    """The words as this tokenizer wants them.

    Some mark a word by the space before it and lose the mark on words given one by one.
    """
    probe = ["a", "a"]
    whole = tokenizer.encode(" ".join(probe)).ids
    if tokenizer.encode(probe, is_pretokenized=True).ids == whole:
        return list(words)
    return [words[0], *(f" {word}" for word in words[1:])]


def _align(encoding: Encoding, sentence: TaggedWords) -> AlignedTags:
    firsts: dict[int, int] = {}
    for token, word in enumerate(encoding.word_ids):
        if word is not None:
            firsts.setdefault(word, token)
    return AlignedTags(tuple(firsts.values()), tuple(sentence.tags[word] for word in firsts))


class TokenClassificationEvaluation(Evaluation):
    """Every word has the best label of its first token: `entity_f1` decides."""

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
        """`entity_f1` (an entity counts when kind and both ends are right), `token_accuracy`."""
        hits = predicted = expected = 0
        for row, sentence in zip(reduced, self._aligned, strict=True):
            given = extract_entities([self._labels[int(label)] for label in row])
            right = extract_entities([self._labels[label] for label in sentence.tags])
            hits += len(given & right)
            predicted += len(given)
            expected += len(right)
        right_tags = np.concatenate([sentence.tags for sentence in self._aligned])
        return {
            "entity_f1": f1(hits, predicted, expected),
            "token_accuracy": accuracy(np.concatenate(reduced), right_tags),
        }

    def _reduce(self, index: int, answer: Output) -> ReducedOutput:
        best: ReducedOutput = (
            answer[list(self._aligned[index].tokens)].argmax(axis=1).astype(np.float32)
        )
        return best
