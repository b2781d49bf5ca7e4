"""Token look-ups: the vocabulary for tasks, token inspection for `/tokenize` and `/decode`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import dropwhile, takewhile
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.models import Unigram

from deployments.errors import UnknownToken
from deployments.messages import TextTokens
from deployments.tokenization.encodings import open_tokenizer

_PADDING = ("[PAD]", "<pad>")


class TokenVocabulary:
    """The vocabulary of a model, for tasks that return tokens. Thread-safe."""

    unknown_id: int | None  # id of the token for text outside of the vocabulary
    has_continuation_prefix: bool  # tokens inside a word have a prefix, as in `##ing`

    def __init__(self, directory: Path) -> None:
        self._tokenizer = open_tokenizer(directory)
        self.unknown_id = _unknown_id(self._tokenizer)
        prefix = getattr(self._tokenizer.model, "continuing_subword_prefix", None)
        self.has_continuation_prefix = bool(prefix)

    def token(self, token_id: int) -> str:
        """Return the vocabulary entry of an id, such as `##ing`; "" if there is none."""
        return self._tokenizer.id_to_token(token_id) or ""

    def join(self, tokens: Sequence[str]) -> str:
        """Decode vocabulary entries, as `token` returns them, to text."""
        decoder = self._tokenizer.decoder
        text: str = decoder.decode(list(tokens)) if decoder else " ".join(tokens)
        return text

    def text(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def first_token_id(self, text: str) -> int | None:
        """Return the id of the entry `text`, else of the text's first token, else None."""
        whole = self._tokenizer.token_to_id(text)
        if whole is not None:
            return int(whole)
        pieces = self._tokenizer.encode(text, add_special_tokens=False).ids
        return int(pieces[0]) if pieces else None


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    if isinstance(tokenizer.model, Unigram):
        # The class Unigram has no attribute for this id, but the serialized tokenizer contains it.
        unknown: int | None = json.loads(tokenizer.to_str())["model"]["unk_id"]
        return unknown
    name = tokenizer.model.unk_token
    return None if name is None else tokenizer.token_to_id(name)


class TokenInspector:
    """Converter of texts to tokens with offsets, and of token ids to texts. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """`tokenizer` has no truncation and no padding. It may be shared, and is never modified."""
        self._tokenizer = tokenizer
        # Vocabularies may have gaps, so the largest id may exceed the number of tokens.
        self._end = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        # Special tokens that the tokenizer adds before and after a text.
        encoding = self._tokenizer.encode("a")
        before = len(list(takewhile(bool, encoding.special_tokens_mask)))
        after = len(list(takewhile(bool, reversed(encoding.special_tokens_mask))))
        self._padding = {self._tokenizer.token_to_id(token) for token in _PADDING}
        self._before = encoding.ids[:before]
        self._after = encoding.ids[len(encoding.ids) - after :]

    def tokens(self, texts: Sequence[str], *, special: bool) -> tuple[TextTokens, ...]:
        """Tokenize each text without truncation."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=special)
        return tuple(map(_text_tokens, encodings))

    def texts(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        skip_special: bool,
        trim_special: bool = False,
    ) -> tuple[str, ...]:
        """Decode each sequence of token ids. Raises UnknownToken for an id above the largest.

        `trim_special` omits padding at both ends, and the special tokens that the tokenizer adds
        before and after a text.
        """
        for sequence in sequences:
            unknown = max(sequence, default=0)
            if unknown >= self._end:
                raise UnknownToken(
                    f"token id {unknown} is not in the vocabulary; the maximum is {self._end - 1}"
                )
        whole = [self._trim(each) if trim_special else list(each) for each in sequences]
        # `decode` would hold the GIL, and so stop the event loop meanwhile.
        return tuple(self._tokenizer.decode_batch(whole, skip_special_tokens=skip_special))

    def _trim(self, sequence: Sequence[int]) -> list[int]:
        ids = list(sequence)
        while ids and ids[-1] in self._padding:
            ids.pop()
        ids = list(dropwhile(self._padding.__contains__, ids))
        if self._before and ids[: len(self._before)] == self._before:
            ids = ids[len(self._before) :]
        if self._after and ids[-len(self._after) :] == self._after:
            ids = ids[: -len(self._after)]
        return ids


def _text_tokens(encoding: Encoding) -> TextTokens:
    positions = np.flatnonzero(encoding.special_tokens_mask)
    tokens = encoding.tokens if len(positions) else []
    return TextTokens(
        ids=np.array(encoding.ids, dtype=np.int32),
        offsets=np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2),
        special={int(i): tokens[i] for i in positions},
    )
