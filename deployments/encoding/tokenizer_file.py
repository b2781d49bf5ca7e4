"""The sealed tokenizer.json, and what is read of its encodings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from deployments.errors import ArtifactError
from deployments.manifest import TOKENIZER_NAME
from deployments.messages import EncodedItem


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


def item_of(encoding: Encoding, *, pair: bool) -> EncodedItem:
    """The engine's part of an encoding; the second segment of a `pair` is what has the type 1."""
    ids = np.array(encoding.ids, dtype=np.int32)
    types = encoding.type_ids if pair else []
    # Tokenizers of RoBERTa's kind give both segments the type 0: their models know no types.
    return EncodedItem(ids, types.index(1) if 1 in types else len(ids))
