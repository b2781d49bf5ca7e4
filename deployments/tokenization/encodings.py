"""Converts encodings of the `tokenizers` library to items, and truncates long items.

The library can truncate too. For a pair, however, it also returns every combination of a remainder
of the first segment and a remainder of the second. Two segments of 100 kB would need gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from deployments.artifacts.manifest import TOKENIZER_NAME
from deployments.artifacts.store import name_artifact
from deployments.errors import ArtifactError, EngineFailed
from deployments.messages import TokenizedItem, Truncation

# Memory of an open tokenizer, in bytes per comma of its file. A comma follows each entry of a
# vocabulary, and each half of a merge or of a Unigram entry (piece and score), however the file is
# indented. Measured with tokenizers 0.23, as the growth of the process after `return_free_memory`:
# WordPiece 230 to 263 (20,000 to 120,000 entries), BPE 96 to 119 (49,000 tokens, merges as pairs
# and as texts), Unigram 795 to 904 (32,000 to 250,000 pieces; most of it is its prefix tree).
BYTES_PER_COMMA = 260
BPE_BYTES_PER_COMMA = 120
UNIGRAM_BYTES_PER_COMMA = 900
MIN_TOKENIZER_BYTES = 1 << 16


@contextmanager
def translate_panics() -> Iterator[None]:
    """Convert a panic of a library in Rust to EngineFailed.

    A panic raises PanicException, which derives from BaseException, not from Exception. Handlers of
    Exception would not stop it from ending a thread or failing a whole batch. The class cannot be
    imported, so it is recognized by its name.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise EngineFailed("a library in Rust panicked") from error


def open_tokenizer(directory: Path) -> Tokenizer:
    """Open the tokenizer of an artifact without truncation and padding.

    Tokenizer files often configure truncation and padding. Here the manifest limits the tokens, and
    the batch determines the padding. Raises ArtifactError if the file is not a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_NAME))
    except Exception as exc:
        raise ArtifactError(
            f"{name_artifact(directory)}: `{TOKENIZER_NAME}` is not a tokenizer: {exc}"
        ) from exc
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def measure_tokenizer(directory: Path) -> int:
    """Return the bytes of memory that one open tokenizer of an artifact takes.

    Raises ArtifactError if its file cannot be read.
    """
    try:
        content = (directory / TOKENIZER_NAME).read_bytes()
    except OSError as exc:
        raise ArtifactError(
            f"{name_artifact(directory)}: `{TOKENIZER_NAME}` cannot be read: {exc.strerror}"
        ) from exc
    bytes_per_comma = BYTES_PER_COMMA
    # Files of old releases do not name the kind of the model.
    if b'"unk_id":' in content:
        bytes_per_comma = UNIGRAM_BYTES_PER_COMMA
    elif b'"merges":[' in content or b'"merges": [' in content:
        bytes_per_comma = BPE_BYTES_PER_COMMA
    return MIN_TOKENIZER_BYTES + bytes_per_comma * content.count(b",")


def build_item(encoding: Encoding, *, pair: bool) -> TokenizedItem:
    """Convert an encoding. The second segment of a `pair` starts at the first type id 1."""
    ids = np.array(encoding.ids, dtype=np.int32)
    types = encoding.type_ids if pair else []
    # Templates such as RoBERTa's give both segments type 0. The item then has no second segment.
    return TokenizedItem(ids, types.index(1) if 1 in types else len(ids))


def truncate_item(
    encoding: Encoding, max_tokens: int, side: Truncation, end_tokens: int = 0
) -> TokenizedItem:
    """Truncate a text or pair to `max_tokens`, special tokens included.

    `side` selects whether each segment keeps its start or its end. The last `end_tokens` are kept
    in any case, as special tokens are.
    """
    segments = np.array([-1 if i is None else i for i in encoding.sequence_ids])
    segments[len(segments) - end_tokens :] = -1
    positions = [np.flatnonzero(segments == segment) for segment in (0, 1)]
    available = max_tokens - (len(segments) - sum(map(len, positions)))
    counts = longest_first(len(positions[0]), len(positions[1]), available)
    mask = segments == -1
    for own, count in zip(positions, counts, strict=True):
        mask[own[:count] if side is Truncation.KEEP_START else own[len(own) - count :]] = True
    ids = np.array(encoding.ids, dtype=np.int32)[mask]
    second = np.flatnonzero(np.array(encoding.type_ids)[mask] == 1)
    return TokenizedItem(ids, int(second[0]) if len(second) else len(ids))


def longest_first(first: int, second: int, available: int) -> tuple[int, int]:
    """Return how many tokens each of two segments keeps. The longer one loses tokens first."""
    shorter = min(first, second)
    if first + second <= available:
        return first, second
    if 2 * shorter > available:
        # The longer segment gets the odd token.
        less, more = available // 2, available - available // 2
        return (more, less) if first > second else (less, more)
    return (available - shorter, shorter) if first > second else (shorter, available - shorter)
