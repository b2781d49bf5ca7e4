"""A tokenizer for those who want to see its work: tokens of texts, texts of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Encoding

from deployments.encoding.tokenizer_file import open_tokenizer
from deployments.errors import UnknownToken
from deployments.messages import TextTokens


class TokenTable:
    """The whole vocabulary of a model. Safe to share."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = open_tokenizer(directory)
        # Vocabularies of the wild have gaps, so their count is not where they end.
        self._end = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def tokens(self, texts: Sequence[str], *, special: bool) -> tuple[TextTokens, ...]:
        """The tokens of each text, however long; nothing is cut off."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=special)
        return tuple(map(_text_tokens, encodings))

    def texts(self, sequences: Sequence[Sequence[int]], *, skip_special: bool) -> tuple[str, ...]:
        """The text of each sequence of token ids. Raises UnknownToken."""
        for sequence in sequences:
            unknown = max(sequence, default=0)
            if unknown >= self._end:
                raise UnknownToken(
                    f"token id {unknown} is not in the vocabulary, which ends at {self._end - 1}"
                )
        return tuple(
            self._tokenizer.decode(list(sequence), skip_special_tokens=skip_special)
            for sequence in sequences
        )


def _text_tokens(encoding: Encoding) -> TextTokens:
    places = np.flatnonzero(encoding.special_tokens_mask)
    tokens = encoding.tokens if len(places) else []
    return TextTokens(
        ids=np.array(encoding.ids, dtype=np.int32),
        offsets=np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2),
        special={int(place): tokens[place] for place in places},
    )
