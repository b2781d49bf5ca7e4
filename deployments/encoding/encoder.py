"""Texts and pairs of texts to token ids, with a memory of those seen before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from deployments.errors import ArtifactError, InputTooLong
from deployments.manifest import TOKENIZER_NAME
from deployments.messages import Call, EncodedItem, Text, Truncation, characters

# What one remembered encoding costs besides its text and ids: dict slot, key and array objects.
ENTRY_OVERHEAD_BYTES = 300


@dataclass(frozen=True, slots=True)
class Encoded:
    """One call's items, and how many of them were cut to fit."""

    items: list[EncodedItem]
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
        """Tokens of every text of every call, special tokens included.

        A pair is joined the way the tokenizer's own template says. All texts go to the tokenizer
        in one go. A call with a text longer than `max_tokens` becomes InputTooLong, unless it
        asked for truncation; its neighbours are not affected.
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

    def count(self, text: Text) -> int:
        """Tokens of `text`, special tokens included."""
        return len(self._encode_texts([text])[0].ids)

    def _encode_texts(self, texts: list[Text]) -> list[EncodedItem]:
        found: list[EncodedItem | None] = [self._cache.get(text) for text in texts]
        missing = [i for i, item in enumerate(found) if item is None]
        fresh = self._plain.encode_batch_fast([texts[i] for i in missing]) if missing else []
        for i, encoding in zip(missing, fresh, strict=True):
            item = _item(encoding, texts[i])
            self._cache.put(texts[i], item)
            found[i] = item
        return [item for item in found if item is not None]

    def _within_limit(self, call: Call, encoded: list[EncodedItem]) -> Encoded:
        truncated = 0
        for i, item in enumerate(encoded):
            if len(item.ids) <= self.max_tokens:
                continue
            if call.truncation is Truncation.REFUSE:
                raise InputTooLong(
                    f"`{call.fields[i]}` has {len(item.ids)} tokens, the model reads at most "
                    f"{self.max_tokens}; shorten it or ask for truncation",
                    field=call.fields[i],
                )
            (cut,) = self._cutting[call.truncation].encode_batch_fast([call.texts[i]])
            encoded[i] = _item(cut, call.texts[i])
            truncated += 1
        return Encoded(encoded, truncated)


def _item(encoding: Encoding, text: Text) -> EncodedItem:
    ids = np.array(encoding.ids, dtype=np.int32)
    types = [] if isinstance(text, str) else encoding.type_ids
    # Tokenizers of RoBERTa's kind give both segments the type 0: their models know no types.
    return EncodedItem(ids, types.index(1) if 1 in types else len(ids))


def _open(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:
        raise ArtifactError(f"{path}: not a tokenizer: {exc}") from exc


def _cutting(path: Path, max_tokens: int, direction: str) -> Tokenizer:
    tokenizer = _open(path)
    tokenizer.no_padding()
    # Of a pair, the longer segment is cut first.
    tokenizer.enable_truncation(max_tokens, direction=direction, strategy="longest_first")
    return tokenizer


class TokenCache:
    """Encodings of recent texts, least recently used out first, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: OrderedDict[Text, EncodedItem] = OrderedDict()

    def get(self, text: Text) -> EncodedItem | None:
        """The remembered tokens of `text`, or None."""
        item = self._entries.get(text)
        if item is not None:
            self._entries.move_to_end(text)
        return item

    def put(self, text: Text, item: EncodedItem) -> None:
        """Remember `item`, unless it alone exceeds the bound."""
        size = _entry_bytes(text, item)
        if size > self.max_bytes or text in self._entries:
            return
        self._entries[text] = item
        self.bytes += size
        self._evict()

    def resize(self, max_bytes: int) -> None:
        """Change the bound."""
        self.max_bytes = max_bytes
        self._evict()

    def _evict(self) -> None:
        while self.bytes > self.max_bytes:
            text, item = self._entries.popitem(last=False)
            self.bytes -= _entry_bytes(text, item)


def _entry_bytes(text: Text, item: EncodedItem) -> int:
    # Four bytes a character is the widest a Python string gets.
    return 4 * characters(text) + item.ids.nbytes + ENTRY_OVERHEAD_BYTES
