"""Converts token scores to entities: joins tokens to words, groups labels and merges windows.

The rules are those of the transformers pipeline (5.23, token_classification.py), so that results
are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

# pydantic, which documents responses, requires this TypedDict before Python 3.12.
from typing_extensions import TypedDict

from deployments.messages import TokenizedItem, TokenOffsets
from deployments.tasks.numbers import softmax

if TYPE_CHECKING:  # keeps the tokenizers library out of the ingress
    from deployments.tokenization.vocabulary import TokenVocabulary

WordRule = Literal["first", "average", "max"]  # how a word's score follows from its tokens


class TokenEntity(TypedDict):
    """One token and its label.

    `index` counts tokens, special tokens included; `start` and `end` count characters.
    """

    entity: str
    score: float
    index: int
    word: str
    start: int
    end: int


class EntityGroup(TypedDict):
    """Adjacent words of one entity type. `start` and `end` count characters, end exclusive."""

    entity_group: str
    score: float
    word: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WindowTokens:
    """The N tokens of one window without special tokens."""

    text: str
    ids: NDArray[np.int32]  # [N]
    positions: NDArray[np.intp]  # [N] index in the window, special tokens included
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
        """Select the tokens of `item` and convert their logits [T, W] to probabilities."""
        positions = np.flatnonzero(layout.segments >= 0)
        scores = softmax(logits[positions])
        return cls(
            text, item.ids[positions], positions, layout.offsets[positions], scores, vocabulary
        )

    def word(self, i: int) -> str:
        """Return token i as spelled in the vocabulary; an unknown token as spelled in the text."""
        token_id = int(self.ids[i])
        if token_id != self.vocabulary.unknown_id:
            return self.vocabulary.token(token_id)
        start, end = self.offsets[i]
        return self.text[start:end]

    def word_starts(self) -> NDArray[np.bool_]:
        """Return whether each token starts a word, [N]. The first and unknown tokens always do.

        With continuation prefixes (`##ing`), a token continues a word if its spelling and its text
        differ in length. In other vocabularies, a token starts a word if a space precedes it or is
        its first character. Punctuation then belongs to the adjacent word.
        """
        starts, ends = self.offsets.T
        is_start: NDArray[np.bool_] = self.ids == self.vocabulary.unknown_id
        if self.vocabulary.has_continuation_prefix:
            spelled = [len(self.vocabulary.token(int(token_id))) for token_id in self.ids]
            is_start |= np.equal(spelled, ends - starts)
        else:
            is_start |= [start == 0 or " " in self.text[start - 1 : start + 1] for start in starts]
        is_start[:1] = True
        return is_start


@dataclass(frozen=True, slots=True)
class LabeledSpans:
    """N tokens or words with one label each, in text order."""

    labels: NDArray[np.intp]  # [N] index of the best label
    scores: NDArray[np.float32]  # [N] probability of the best label
    starts: NDArray[np.int32]  # [N] characters
    ends: NDArray[np.int32]  # [N] characters, exclusive
    word: Callable[[int], str]  # spells span i; called on demand, because few spans are returned


def label_tokens(tokens: WindowTokens) -> LabeledSpans:
    """Label each token on its own: a span is one token."""
    starts, ends = tokens.offsets.T
    return _build_spans(tokens.scores, starts, ends, tokens.word)


def label_words(tokens: WindowTokens, rule: WordRule) -> LabeledSpans:
    """Label whole words; `rule` combines the scores of their tokens."""
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
) -> LabeledSpans:
    return LabeledSpans(scores.argmax(axis=1), scores.max(axis=1), starts, ends, word)


def _first(scores: NDArray[np.float32], firsts: NDArray[np.intp]) -> NDArray[np.float32]:
    return scores[firsts]


def _most_confident(scores: NDArray[np.float32], firsts: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return the scores of each word's most confident token, the first if several are equal."""
    peaks = scores.max(axis=1)
    counts = np.diff(firsts, append=len(peaks))
    highest = np.flatnonzero(peaks == np.repeat(np.maximum.reduceat(peaks, firsts), counts))
    words = np.searchsorted(firsts, highest, side="right")
    _, first_of_word = np.unique(words, return_index=True)
    return scores[highest[first_of_word]]


def _means(values: NDArray[np.float32], firsts: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return the means along the first axis of the segments that start at `firsts`."""
    counts = np.diff(firsts, append=len(values)).astype(np.float32)
    sums: NDArray[np.float32] = np.add.reduceat(values, firsts, axis=0)
    means: NDArray[np.float32] = (sums.T / counts).T
    return means


_WORD_SCORES = {"first": _first, "average": _means, "max": _most_confident}


def list_token_entities(
    tokens: WindowTokens, labels: Sequence[str], ignored: Sequence[str]
) -> list[TokenEntity]:
    """Return every token whose label is not in `ignored`."""
    spans = label_tokens(tokens)
    included = np.array([label not in ignored for label in labels])[spans.labels]
    return [
        {
            "entity": labels[spans.labels[i]],
            "score": float(spans.scores[i]),
            "index": int(tokens.positions[i]),
            "word": spans.word(int(i)),
            "start": int(spans.starts[i]),
            "end": int(spans.ends[i]),
        }
        for i in np.flatnonzero(included)
    ]


def group_entities(
    spans: LabeledSpans, labels: Sequence[str], ignored: Sequence[str], vocabulary: TokenVocabulary
) -> list[EntityGroup]:
    """Join adjacent spans of one tag to entities; skip the entity types in `ignored`.

    A tag is a label without its prefix. A label with `B-` starts an entity. A label with `I-` or
    without prefix continues an entity of the same tag, and starts an entity after another tag.
    """
    if not len(spans.labels):
        return []
    label_tags, label_begins = _split_labels(labels)
    tags = label_tags[spans.labels]
    begins = label_begins[spans.labels]
    begins[1:] |= tags[1:] != tags[:-1]
    begins[0] = True
    firsts = np.flatnonzero(begins)
    bounds = np.append(firsts, len(begins))
    scores = _means(spans.scores, firsts)
    groups: list[EntityGroup] = []
    for i, first in enumerate(firsts):
        entity_type = labels[spans.labels[first]].split("-", 1)[-1]
        if entity_type not in ignored:
            end = bounds[i + 1]
            words = [spans.word(span) for span in range(first, end)]
            groups.append(
                {
                    "entity_group": entity_type,
                    "score": float(scores[i]),
                    "word": vocabulary.join(words),
                    "start": int(spans.starts[first]),
                    "end": int(spans.ends[end - 1]),
                }
            )
    return groups


def _split_labels(labels: Sequence[str]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Return the tag number of each label, and whether the label starts an entity."""
    tags = [label[2:] if label.startswith(("B-", "I-")) else label for label in labels]
    _, numbers = np.unique(np.array(tags, dtype=object), return_inverse=True)
    return numbers, np.array([label.startswith("B-") for label in labels])


def merge_windows(groups: Sequence[EntityGroup]) -> list[EntityGroup]:
    """Merge the entities of overlapping windows in text order.

    If two entities overlap, the longer one stays. If they are equally long, the one with the higher
    score stays.
    """
    merged: list[EntityGroup] = []
    for group in sorted(groups, key=lambda group: group["start"]):
        if not merged or group["start"] >= merged[-1]["end"]:
            merged.append(group)
        elif _rank(group) > _rank(merged[-1]):
            merged[-1] = group
    return merged


def _rank(group: EntityGroup) -> tuple[int, float]:
    return group["end"] - group["start"], group["score"]
