"""Examples to items: the tokenizer of a model, cutting at what the model reads."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from build_artifacts.evaluation.base import ModelUnderTest
from deployments.encoding.encoder import Encoder
from deployments.encoding.tokenizer_file import open_tokenizer
from deployments.errors import ServeError
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


def open_cutting_tokenizer(model: ModelUnderTest) -> Tokenizer:
    """The server's tokenizer, for offsets and words; cuts at what the model reads."""
    tokenizer = open_tokenizer(model.directory)
    tokenizer.enable_truncation(model.max_tokens)
    return tokenizer
