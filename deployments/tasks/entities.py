"""Scored tokens to entities: words put together, labels grouped, windows merged.

The rules are those of transformers' own pipeline (5.23, token_classification.py), so that a model
answers the same here as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

# Before Python 3.12 this is the only TypedDict that pydantic, which documents answers, reads.
from typing_extensions import TypedDict

from deployments.messages import TokenizedItem, TokenOffsets
from deployments.tasks.numbers import softmax

if TYPE_CHECKING:  # the ingress, which parses, has no use for a tokenizer
    from deployments.tokenization.vocabulary import TokenVocabulary

WordRule = Literal["first", "average", "max"]  # whose scores a word has, when its tokens disagree


class TokenEntity(TypedDict):
    """One token and its label; `index` counts special tokens, `start` and `end` characters."""

    entity: str
    score: float
    index: int
    word: str
    start: int
    end: int


class EntityGroup(TypedDict):
    """Neighbouring words of one kind; `start` and `end` are characters, end exclusive."""

    entity_group: str
    score: float
    word: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WindowTokens:
    """The N tokens of one window that stand in its text, special tokens left out."""

    text: str
    ids: NDArray[np.int32]  # [N]
    places: NDArray[np.intp]  # [N] index in the window, special tokens counted
    offsets: NDArray[np.int32]  # [N, 2] characters
    scores: NDArray[np.float32]  # [N, W], each row sums to 1
    vocabulary: TokenVocabulary

    @classmethod
    def read(
        cls,
        text: str,
        item: TokenizedItem,
        layout: TokenOffsets,
        logits: NDArray[np.float32],
        vocabulary: TokenVocabulary,
    ) -> WindowTokens:
        """The tokens of `item` with the probabilities of their labels; logits are [T, W]."""
        places = np.flatnonzero(layout.segments >= 0)
        scores = softmax(logits[places])
        return cls(text, item.ids[places], places, layout.offsets[places], scores, vocabulary)

    def word(self, i: int) -> str:
        """Token i as the vocabulary spells it; what it does not know, as the text does."""
        token_id = int(self.ids[i])
        if token_id != self.vocabulary.unknown_id:
            return self.vocabulary.token(token_id)
        start, end = self.offsets[i]
        return self.text[start:end]

    def word_starts(self) -> NDArray[np.bool_]:
        """[N], whether each token opens a word; the first one does.

        Vocabularies that mark the others (`##ing`) tell by a token longer than its text. Else a
        token with a space before it opens one, and punctuation belongs to the word it touches.
        """
        starts, ends = self.offsets.T
        word_starts: NDArray[np.bool_] = self.ids == self.vocabulary.unknown_id
        if self.vocabulary.has_continuation_prefix:
            spelled = [len(self.vocabulary.token(int(token_id))) for token_id in self.ids]
            word_starts |= np.equal(spelled, ends - starts)
        else:
            word_starts |= [
                start == 0 or " " in self.text[start - 1 : start + 1] for start in starts
            ]
        word_starts[:1] = True
        return word_starts


@dataclass(frozen=True, slots=True)
class LabelledSpans:
    """What gets one label each, tokens or whole words, in the order of the text; N of them."""

    labels: NDArray[np.intp]  # [N] index of the best label
    scores: NDArray[np.float32]  # [N] its probability
    starts: NDArray[np.int32]  # [N] characters
    ends: NDArray[np.int32]  # [N] characters, exclusive
    word: Callable[[int], str]  # of unit i; spelled only for the few that are answered


def label_tokens(tokens: WindowTokens) -> LabelledSpans:
    """Every token by itself."""
    starts, ends = tokens.offsets.T
    return _build_spans(tokens.scores, starts, ends, tokens.word)


def label_words(tokens: WindowTokens, rule: WordRule) -> LabelledSpans:
    """Whole words, whose tokens agree by `rule`."""
    if not len(tokens.ids):
        return label_tokens(tokens)
    firsts = np.flatnonzero(tokens.word_starts())
    bounds = np.append(firsts, len(tokens.ids))

    def word(i: int) -> str:
        pieces = [tokens.word(piece) for piece in range(bounds[i], bounds[i + 1])]
        return tokens.vocabulary.join(pieces)

    scores = _WORD_SCORES[rule](tokens.scores, firsts)
    return _build_spans(scores, tokens.offsets[firsts, 0], tokens.offsets[bounds[1:] - 1, 1], word)


def _build_spans(
    scores: NDArray[np.float32],
    starts: NDArray[np.int32],
    ends: NDArray[np.int32],
    word: Callable[[int], str],
) -> LabelledSpans:
    return LabelledSpans(scores.argmax(axis=1), scores.max(axis=1), starts, ends, word)


def _first(scores: NDArray[np.float32], firsts: NDArray[np.intp]) -> NDArray[np.float32]:
    return scores[firsts]


def _most_confident(scores: NDArray[np.float32], firsts: NDArray[np.intp]) -> NDArray[np.float32]:
    """The row of each word's surest token, the first of equals."""
    peaks = scores.max(axis=1)
    counts = np.diff(firsts, append=len(peaks))
    highest = np.flatnonzero(peaks == np.repeat(np.maximum.reduceat(peaks, firsts), counts))
    words = np.searchsorted(firsts, highest, side="right")
    _, chosen = np.unique(words, return_index=True)
    return scores[highest[chosen]]


def _means(values: NDArray[np.float32], firsts: NDArray[np.intp]) -> NDArray[np.float32]:
    """Means along the first axis of the stretches that begin at `firsts`."""
    counts = np.diff(firsts, append=len(values)).astype(np.float32)
    sums: NDArray[np.float32] = np.add.reduceat(values, firsts, axis=0)
    means: NDArray[np.float32] = (sums.T / counts).T
    return means


_WORD_SCORES = {"first": _first, "average": _means, "max": _most_confident}


def list_token_entities(
    tokens: WindowTokens, labels: Sequence[str], ignored: Sequence[str]
) -> list[TokenEntity]:
    """Every token with its label, unless the label is among `ignored`."""
    units = label_tokens(tokens)
    wanted = np.array([label not in ignored for label in labels])[units.labels]
    return [
        {
            "entity": labels[units.labels[i]],
            "score": float(units.scores[i]),
            "index": int(tokens.places[i]),
            "word": units.word(int(i)),
            "start": int(units.starts[i]),
            "end": int(units.ends[i]),
        }
        for i in np.flatnonzero(wanted)
    ]


def group_entities(
    units: LabelledSpans, labels: Sequence[str], ignored: Sequence[str], vocabulary: TokenVocabulary
) -> list[EntityGroup]:
    """Neighbours of one tag as one entity each, unless its kind is among `ignored`.

    `B-` opens an entity; `I-`, or a label without either, continues one of its own tag and opens
    one elsewhere.
    """
    if not len(units.labels):
        return []
    tags, word_starts = _split_labels(labels)
    own = tags[units.labels]
    opens = word_starts[units.labels]
    opens[1:] |= own[1:] != own[:-1]
    opens[0] = True
    firsts = np.flatnonzero(opens)
    bounds = np.append(firsts, len(opens))
    scores = _means(units.scores, firsts)
    groups: list[EntityGroup] = []
    for i, first in enumerate(firsts):
        kind = labels[units.labels[first]].split("-", 1)[-1]
        if kind not in ignored:
            end = bounds[i + 1]
            words = [units.word(unit) for unit in range(first, end)]
            groups.append(
                {
                    "entity_group": kind,
                    "score": float(scores[i]),
                    "word": vocabulary.join(words),
                    "start": int(units.starts[first]),
                    "end": int(units.ends[end - 1]),
                }
            )
    return groups


def _split_labels(labels: Sequence[str]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Per label a number that labels of one tag share, and whether it opens an entity."""
    tags = [label[2:] if label.startswith(("B-", "I-")) else label for label in labels]
    _, numbers = np.unique(np.array(tags, dtype=object), return_inverse=True)
    return numbers, np.array([label.startswith("B-") for label in labels])


def merge_windows(groups: Sequence[EntityGroup]) -> list[EntityGroup]:
    """The entities of overlapping windows without repetitions, in the order of the text.

    Of two that share characters the longer stays, of equally long ones the likelier.
    """
    kept: list[EntityGroup] = []
    for group in sorted(groups, key=lambda group: group["start"]):
        if not kept or group["start"] >= kept[-1]["end"]:
            kept.append(group)
        elif _rank(group) > _rank(kept[-1]):
            kept[-1] = group
    return kept


def _rank(group: EntityGroup) -> tuple[int, float]:
    return group["end"] - group["start"], group["score"]
