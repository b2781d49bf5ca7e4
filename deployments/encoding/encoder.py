"""Text to token ids, with a memory of texts seen before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from deployments.errors import ArtifactError, InputTooLong
from deployments.manifest import TOKENIZER_NAME
from deployments.messages import Call, TokenIds, Truncation

# What one remembered encoding costs besides its text and ids: dict slot, key and array objects.
ENTRY_OVERHEAD_BYTES = 300


@dataclass(frozen=True, slots=True)
class Encoded:
    """One call's token ids, an array per text, and how many texts were cut to fit."""

    ids: list[TokenIds]
    truncated: int


class Encoder:
    """One model's tokenizer. Not thread-safe: give it one thread.

    Files of the wild set their own truncation and padding; both are switched off here, because
    limits belong to the manifest and padding to the batch.
    """

    def __init__(self, directory: Path, max_tokens: int, cache_bytes: int = 0) -> None:
        self.max_tokens = max_tokens
        path = directory / TOKENIZER_NAME
        self._plain = _open(path)
        self._plain.no_padding()
        self._plain.no_truncation()
        self._cutting = {
            Truncation.KEEP_START: _cutting(path, max_tokens, "right"),
            Truncation.KEEP_END: _cutting(path, max_tokens, "left"),
        }
        self._cache = TokenCache(cache_bytes)

    def resize_cache(self, cache_bytes: int) -> None:
        """Bound the cache anew; drops what no longer fits."""
        self._cache.resize(cache_bytes)

    def encode(self, calls: Sequence[Call]) -> list[Encoded | InputTooLong]:
        """Token ids of every text of every call, special tokens included.

        All texts go to the tokenizer in one go. A call with a text longer than `max_tokens`
        becomes InputTooLong, unless it asked for truncation; its neighbours are not affected.
        """
        encoded = self._encode_texts([text for call in calls for text in call.texts])
        outcomes: list[Encoded | InputTooLong] = []
        start = 0
        for call in calls:
            own = encoded[start : start + len(call.texts)]
            start += len(call.texts)
            try:
                outcomes.append(self._within_limit(call, own))
            except InputTooLong as error:
                outcomes.append(error)
        return outcomes

    def count(self, text: str) -> int:
        """Tokens of `text`, special tokens included."""
        return len(self._encode_texts([text])[0])

    def _encode_texts(self, texts: list[str]) -> list[TokenIds]:
        found: list[TokenIds | None] = [self._cache.get(text) for text in texts]
        missing = [i for i, ids in enumerate(found) if ids is None]
        fresh = self._plain.encode_batch_fast([texts[i] for i in missing]) if missing else []
        for i, encoding in zip(missing, fresh, strict=True):
            ids = np.array(encoding.ids, dtype=np.int32)
            self._cache.put(texts[i], ids)
            found[i] = ids
        return [ids for ids in found if ids is not None]

    def _within_limit(self, call: Call, encoded: list[TokenIds]) -> Encoded:
        truncated = 0
        for i, ids in enumerate(encoded):
            if len(ids) <= self.max_tokens:
                continue
            if call.truncation is Truncation.REFUSE:
                raise InputTooLong(
                    f"`{call.fields[i]}` has {len(ids)} tokens, the model reads at most "
                    f"{self.max_tokens}; shorten it or ask for truncation",
                    field=call.fields[i],
                )
            cut = self._cutting[call.truncation].encode(call.texts[i])
            encoded[i] = np.array(cut.ids, dtype=np.int32)
            truncated += 1
        return Encoded(encoded, truncated)


def _open(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:
        raise ArtifactError(f"{path}: not a tokenizer: {exc}") from exc


def _cutting(path: Path, max_tokens: int, direction: str) -> Tokenizer:
    tokenizer = _open(path)
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens, direction=direction)
    return tokenizer


class TokenCache:
    """Encodings of recent texts, least recently used out first, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: OrderedDict[str, TokenIds] = OrderedDict()

    def get(self, text: str) -> TokenIds | None:
        """The remembered ids of `text`, or None."""
        ids = self._entries.get(text)
        if ids is not None:
            self._entries.move_to_end(text)
        return ids

    def put(self, text: str, ids: TokenIds) -> None:
        """Remember `ids`, unless they alone exceed the bound."""
        size = _entry_bytes(text, ids)
        if size > self.max_bytes or text in self._entries:
            return
        self._entries[text] = ids
        self.bytes += size
        self._evict()

    def resize(self, max_bytes: int) -> None:
        """Change the bound."""
        self.max_bytes = max_bytes
        self._evict()

    def _evict(self) -> None:
        while self.bytes > self.max_bytes:
            text, ids = self._entries.popitem(last=False)
            self.bytes -= _entry_bytes(text, ids)


def _entry_bytes(text: str, ids: TokenIds) -> int:
    # Four bytes a character is the widest a Python string gets.
    return 4 * len(text) + ids.nbytes + ENTRY_OVERHEAD_BYTES
