"""Examples to items: the tokenizer of a model, cutting at what the model reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Encoding, Tokenizer

from build_artifacts.evaluation.base import ModelUnderTest
from deployments.encoding.encoder import Encoder
from deployments.errors import ServeError
from deployments.manifest import TOKENIZER_NAME
from deployments.messages import Call, EncodedItem, Text, Truncation


def encode_texts(model: ModelUnderTest, texts: Sequence[Text]) -> list[EncodedItem]:
    """One item per text or pair of texts, by the server's own encoder."""
    call = Call(
        texts=tuple(texts),
        fields=tuple(f"examples[{i}]" for i in range(len(texts))),
        options=None,
        truncation=Truncation.KEEP_START,
        deadline_s=float("inf"),
    )
    (encoded,) = Encoder(model.directory, model.max_tokens).encode([call])
    if isinstance(encoded, ServeError):
        raise encoded
    return encoded.items


def open_tokenizer(model: ModelUnderTest) -> Tokenizer:
    """The tokenizer itself, for offsets and words; its file's own limits and padding are off."""
    tokenizer = Tokenizer.from_file(str(model.directory / TOKENIZER_NAME))
    tokenizer.no_padding()
    tokenizer.enable_truncation(model.max_tokens)
    return tokenizer


def to_item(encoding: Encoding) -> EncodedItem:
    """What an engine reads of an encoding; a second segment is what has the type 1."""
    ids, types = np.array(encoding.ids, dtype=np.int32), encoding.type_ids
    return EncodedItem(ids, types.index(1) if 1 in types else len(ids))
