"""Too many tokens cut to as many as a model reads.

The tokenizer library cuts too, and keeps what it cut off as further encodings: of a pair, each rest
of one segment with each rest of the other. Two segments of 100 kB ask for gigabytes that way.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from deployments.artifacts.manifest import TOKENIZER_NAME
from deployments.errors import ArtifactError
from deployments.messages import TokenizedItem, Truncation


def open_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of an artifact. Raises ArtifactError.

    Files of the wild set their own truncation and padding; both are switched off here, because
    limits belong to the manifest and padding to the batch.
    """
    path = directory / TOKENIZER_NAME
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:
        raise ArtifactError(f"{path}: not a tokenizer: {exc}") from exc
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def build_item(encoding: Encoding, *, pair: bool) -> TokenizedItem:
    """The engine's part of an encoding; the second segment of a `pair` is what has the type 1."""
    ids = np.array(encoding.ids, dtype=np.int32)
    types = encoding.type_ids if pair else []
    # Tokenizers of RoBERTa's kind give both segments the type 0: their models know no types.
    return TokenizedItem(ids, types.index(1) if 1 in types else len(ids))


def truncate_item(encoding: Encoding, most: int, keep: Truncation) -> TokenizedItem:
    """At most `most` tokens of a text or a pair, special tokens among them.

    `keep` says whether the start or the end of each segment is kept.
    """
    segments = np.array([-1 if one is None else one for one in encoding.sequence_ids])
    places = [np.flatnonzero(segments == segment) for segment in (0, 1)]
    room = most - (len(segments) - sum(map(len, places)))
    kept = segments == -1
    for own, count in zip(places, longest_first(len(places[0]), len(places[1]), room), strict=True):
        kept[own[:count] if keep is Truncation.KEEP_START else own[len(own) - count :]] = True
    ids = np.array(encoding.ids, dtype=np.int32)[kept]
    second = np.flatnonzero(np.array(encoding.type_ids)[kept] == 1)
    return TokenizedItem(ids, int(second[0]) if len(second) else len(ids))


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens two segments may keep: the longer one loses until both are as long."""
    shorter = min(first, second)
    if first + second <= room:
        return first, second
    if 2 * shorter > room:
        # Of an odd token more the longer one has the use.
        less, more = room // 2, room - room // 2
        return (more, less) if first > second else (less, more)
    return (room - shorter, shorter) if first > second else (shorter, room - shorter)
