"""Texts and pairs of texts to token ids, with a memory of those seen before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from deployments.errors import EmptyInput, InputTooLong, ServeError
from deployments.messages import (
    Call,
    Text,
    TokenizedItem,
    TokenOffsets,
    Truncation,
    Windowing,
    count_characters,
)
from deployments.tokenization.encodings import build_item, open_tokenizer, truncate_item
from deployments.tokenization.windows import Window, WindowTokenizer

# What one remembered encoding costs besides its text and ids: dict slot, key and array objects.
ENTRY_OVERHEAD_BYTES = 300
# Of one call, all texts together: what an encoder's whole line holds. A thousand questions about one
# small context, in windows of a few tokens, would be a million.
MAX_CALL_WINDOWS = 4_096


@dataclass(frozen=True, slots=True)
class TokenizedTexts:
    """One call's items, and how many of them were cut to fit."""

    items: list[TokenizedItem]
    truncated: int
    token_offsets: tuple[TokenOffsets, ...] = ()  # one per item where the call asked for them


class CachingTokenizer:
    """One model's tokenizer. Not thread-safe: give it one thread."""

    def __init__(self, directory: Path, max_tokens: int, cache_bytes: int = 0) -> None:
        self.max_tokens = max_tokens
        self._directory = directory
        self._plain = open_tokenizer(directory)
        self._windowing: WindowTokenizer | None = None  # opened when a task first asks for layouts
        self._cache = TokenCache(cache_bytes)

    @property
    def lookups(self) -> tuple[int, int]:
        """Texts looked up in the cache so far, and how many of them it had."""
        return self._cache.lookups, self._cache.hits

    def resize_cache(self, cache_bytes: int) -> None:
        """Bound the cache anew; drops what no longer fits."""
        self._cache.resize(cache_bytes)

    def tokenize(self, calls: Sequence[Call]) -> list[TokenizedTexts | ServeError]:
        """Tokens of every text of every call, special tokens included.

        A pair is joined the way the tokenizer's own template says. All texts go to the tokenizer
        in one go, but for calls with a windowing. A call with a text longer than `max_tokens`
        becomes InputTooLong, unless it asked for truncation or windows, and one with a text of no
        tokens at all EmptyInput; its neighbours are not affected.
        """
        plain = [text for call in calls if call.windowing is None for text in call.texts]
        encoded = iter(self._tokenize_texts(plain))
        outcomes: list[TokenizedTexts | ServeError] = []
        for call in calls:
            try:
                if call.windowing is None:
                    own = list(islice(encoded, len(call.texts)))
                    outcome = self._within_limit(call, own)
                else:
                    outcome = self._in_windows(call, call.windowing)
                _check_tokens(call, outcome)
                outcomes.append(outcome)
            except ServeError as error:
                outcomes.append(error)
        return outcomes

    def _tokenize_texts(self, texts: list[Text]) -> list[TokenizedItem]:
        found: list[TokenizedItem | None] = [self._cache.get(text) for text in texts]
        missing = [i for i, item in enumerate(found) if item is None]
        fresh = self._plain.encode_batch_fast([texts[i] for i in missing]) if missing else []
        for i, encoding in zip(missing, fresh, strict=True):
            item = build_item(encoding, pair=_is_pair(texts[i]))
            self._cache.put(texts[i], item)
            found[i] = item
        return [item for item in found if item is not None]

    def _within_limit(self, call: Call, encoded: list[TokenizedItem]) -> TokenizedTexts:
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
            (whole,) = self._plain.encode_batch_fast([call.texts[i]])
            encoded[i] = truncate_item(whole, self.max_tokens, call.truncation)
            truncated += 1
        return TokenizedTexts(encoded, truncated)

    def _in_windows(self, call: Call, windowing: Windowing) -> TokenizedTexts:
        if self._windowing is None:
            self._windowing = WindowTokenizer(self._directory, self.max_tokens)
        windows: list[Window] = []
        truncated = 0
        for i, text in enumerate(call.texts):
            try:
                own, cut = self._windowing.windows(text, i, windowing, call.truncation)
            except InputTooLong as error:
                field = call.fields[i]
                raise InputTooLong(f"`{field}` {error.message}", field=field) from None
            windows += own
            if len(windows) > MAX_CALL_WINDOWS:
                raise InputTooLong(
                    f"`{call.fields[i]}` and the texts before it make more than "
                    f"{MAX_CALL_WINDOWS} windows; send fewer or shorter texts, or ask for larger "
                    "windows or a smaller stride",
                    field=call.fields[i],
                )
            truncated += cut
        items = [item for item, _ in windows]
        return TokenizedTexts(items, truncated, tuple(layout for _, layout in windows))


def _check_tokens(call: Call, encoded: TokenizedTexts) -> None:
    """Raise EmptyInput for a text of blanks, of a tokenizer that adds no special tokens."""
    for i, item in enumerate(encoded.items):
        if not len(item.ids):
            field = call.fields[encoded.token_offsets[i].text if encoded.token_offsets else i]
            raise EmptyInput(f"`{field}` has no tokens", field=field)


def _is_pair(text: Text) -> bool:
    return not isinstance(text, str)


class TokenCache:
    """Encodings of recent texts, least recently used out first, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.lookups = 0
        self.hits = 0
        self._entries: OrderedDict[Text, TokenizedItem] = OrderedDict()

    def get(self, text: Text) -> TokenizedItem | None:
        """The remembered tokens of `text`, or None."""
        self.lookups += 1
        item = self._entries.get(text)
        if item is not None:
            self.hits += 1
            self._entries.move_to_end(text)
        return item

    def put(self, text: Text, item: TokenizedItem) -> None:
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


def _entry_bytes(text: Text, item: TokenizedItem) -> int:
    # Four bytes a character is the widest a Python string gets.
    return 4 * count_characters(text) + item.ids.nbytes + ENTRY_OVERHEAD_BYTES
