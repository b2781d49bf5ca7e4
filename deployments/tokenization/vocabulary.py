"""A tokenizer for those who want to see its work: tokens of texts, texts of tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.models import Unigram

from deployments.errors import UnknownToken
from deployments.messages import TextTokens
from deployments.tokenization.encodings import open_tokenizer


class TokenVocabulary:
    """The tokenizer of a model, for tasks whose answers name tokens. Safe to share."""

    unknown_id: int | None  # of the token that stands for whatever has none
    has_continuation_prefix: bool  # tokens inside a word are spelled so, as in `##ing`

    def __init__(self, directory: Path) -> None:
        self._tokenizer = open_tokenizer(directory)
        self.unknown_id = _unknown_id(self._tokenizer)
        prefix = getattr(self._tokenizer.model, "continuing_subword_prefix", None)
        self.has_continuation_prefix = bool(prefix)

    def token(self, token_id: int) -> str:
        """The token of that id as the vocabulary spells it, such as `##ing`; "" for none."""
        return self._tokenizer.id_to_token(token_id) or ""

    def joined(self, tokens: Sequence[str]) -> str:
        """Tokens, as `token` spells them, put together to text."""
        decoder = self._tokenizer.decoder
        text: str = decoder.decode(list(tokens)) if decoder else " ".join(tokens)
        return text

    def text(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of token ids."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def first_token_id(self, text: str) -> int | None:
        """The id of the token `text`, else of its first piece; None when it has none."""
        whole = self._tokenizer.token_to_id(text)
        if whole is not None:
            return int(whole)
        pieces = self._tokenizer.encode(text, add_special_tokens=False).ids
        return int(pieces[0]) if pieces else None


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    if isinstance(tokenizer.model, Unigram):
        # Its class does not tell, its file does.
        unknown: int | None = json.loads(tokenizer.to_str())["model"]["unk_id"]
        return unknown
    name = tokenizer.model.unk_token
    return None if name is None else tokenizer.token_to_id(name)


class TokenInspector:
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
