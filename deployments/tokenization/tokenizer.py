"""Converts texts and pairs of texts to token ids, with a cache of recent texts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from deployments.artifacts.pair_template import PairTemplate
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
from deployments.tokenization.vocabulary import TokenInspector
from deployments.tokenization.windows import TokenWindow, WindowTokenizer

# Bytes of a cache entry besides its text and ids: dict slot, key and array objects.
ENTRY_OVERHEAD_BYTES = 300
# Maximum windows of all texts of one call. It equals the default limit of items in an encoder's
# queue. Without this limit, a thousand questions about one context could make a million windows of
# a few tokens.
MAX_CALL_WINDOWS = 4_096


@dataclass(frozen=True, slots=True)
class TokenizedTexts:
    """The items of one call: one per text or, with a windowing, one per window of a text."""

    items: list[TokenizedItem]
    truncated: int  # number of texts that were shortened to fit
    token_offsets: tuple[TokenOffsets, ...] = ()  # one per item if the call has a windowing


class CachingTokenizer:
    """The tokenizer of one model. Not thread-safe, except for its `inspector`."""

    def __init__(
        self,
        directory: Path,
        max_tokens: int,
        cache: TokenCache | None = None,
        *,
        pair_template: PairTemplate | None = None,
    ) -> None:
        """Open the tokenizer. Several tokenizers may share one `cache`; None: no cache.

        With a `pair_template`, all texts are pairs that it joins, or texts that it has joined.
        """
        self.max_tokens = max_tokens
        self._pair_template = pair_template
        self._directory = directory
        self._name = str(directory)  # key of this tokenizer in the cache
        self._plain = open_tokenizer(directory)
        self._windowing: WindowTokenizer | None = None  # opened on first use
        self._cache = TokenCache(0) if cache is None else cache

    @cached_property
    def inspector(self) -> TokenInspector:
        """The inspector of the tokens. Thread-safe. Its first use lists the vocabulary."""
        return TokenInspector(self._plain)  # a tokenizer of its own would double the memory

    @property
    def lookups(self) -> tuple[int, int]:
        """The numbers of look-ups and of hits so far, of all tokenizers that share the cache."""
        return self._cache.lookups, self._cache.hits

    def tokenize(self, calls: Sequence[Call]) -> list[TokenizedTexts | ServeError]:
        """Tokenize every text of every call, special tokens included.

        The tokenizer joins the texts of a pair, unless there is a `pair_template`. All calls
        without windowing share one call of the library.

        The outcome of a call is InputTooLong in three cases:
        - a text exceeds the limit, and the call requests neither truncation nor a stride
        - a text cannot be split into windows
        - the call needs more than MAX_CALL_WINDOWS windows

        The outcome is EmptyInput if a text has no tokens. An error of one call does not affect the
        other calls.
        """
        plain = [text for call in calls if call.windowing is None for text in call.texts]
        plain_items = iter(self._tokenize_texts(plain))
        outcomes: list[TokenizedTexts | ServeError] = []
        for call in calls:
            try:
                if call.windowing is None:
                    items = list(islice(plain_items, len(call.texts)))
                    outcome = self._apply_limit(call, items)
                else:
                    outcome = self._split_into_windows(call, call.windowing)
                _check_tokens(call, outcome)
                outcomes.append(outcome)
            except ServeError as error:
                outcomes.append(error)
        return outcomes

    def _tokenize_texts(self, texts: list[Text]) -> list[TokenizedItem]:
        name, cache = self._name, self._cache
        items: list[TokenizedItem | None] = [cache.get(name, text) for text in texts]
        missing = [i for i, item in enumerate(items) if item is None]
        inputs = [self._join(texts[i]) for i in missing]
        encodings = self._plain.encode_batch_fast(inputs) if missing else []
        for i, text, encoding in zip(missing, inputs, encodings, strict=True):
            item = build_item(encoding, pair=_is_pair(text))
            cache.put(name, texts[i], item)
            items[i] = item
        return [item for item in items if item is not None]

    def _apply_limit(self, call: Call, items: list[TokenizedItem]) -> TokenizedTexts:
        truncated = 0
        for i, item in enumerate(items):
            if len(item.ids) <= self.max_tokens:
                continue
            if call.truncation is Truncation.REFUSE:
                raise InputTooLong(
                    f"`{call.fields[i]}` has {len(item.ids)} tokens; the maximum is "
                    f"{self.max_tokens}. Shorten it or request truncation.",
                    field=call.fields[i],
                )
            (whole,) = self._plain.encode_batch_fast([self._join(call.texts[i])])
            end_tokens = 0 if self._pair_template is None else self._pair_template.end_tokens
            items[i] = truncate_item(whole, self.max_tokens, call.truncation, end_tokens)
            truncated += 1
        return TokenizedTexts(items, truncated)

    def join_pairs(self, call: Call) -> Call:
        """Return the call with the texts that the tokenizer reads, so that they can be counted."""
        if self._pair_template is None:
            return call
        return call._replace(texts=tuple(map(self._join, call.texts)))

    def _join(self, text: Text) -> Text:
        if self._pair_template is None or isinstance(text, str):
            return text
        return self._pair_template.join(*text)

    def _split_into_windows(self, call: Call, windowing: Windowing) -> TokenizedTexts:
        if self._windowing is None:
            self._windowing = WindowTokenizer(self._directory, self.max_tokens)
        windows: list[TokenWindow] = []
        truncated = 0
        for i, text in enumerate(call.texts):
            try:
                text_windows, is_truncated = self._windowing.windows(
                    text, i, windowing, call.truncation
                )
            except InputTooLong as error:
                field = call.fields[i]
                raise InputTooLong(f"`{field}` {error.message}", field=field) from None
            windows += text_windows
            check_windows(len(windows), call.fields[i])
            truncated += is_truncated
        items = [item for item, _ in windows]
        return TokenizedTexts(items, truncated, tuple(offsets for _, offsets in windows))


def check_windows(windows: int, field: str) -> None:
    """Raise InputTooLong if the texts up to `field` need more windows than a call may have."""
    if windows > MAX_CALL_WINDOWS:
        raise InputTooLong(
            f"`{field}` and the texts before it need {windows} windows; the maximum is "
            f"{MAX_CALL_WINDOWS}. Send fewer or shorter texts, or set larger windows or a smaller "
            "stride.",
            field=field,
        )


def _check_tokens(call: Call, texts: TokenizedTexts) -> None:
    """Raise EmptyInput for an item without tokens: a blank text without special tokens."""
    for i, item in enumerate(texts.items):
        if not len(item.ids):
            field = call.fields[texts.token_offsets[i].text if texts.token_offsets else i]
            raise EmptyInput(f"`{field}` has no tokens", field=field)


def _is_pair(text: Text) -> bool:
    return not isinstance(text, str)


class TokenCache:
    """Tokens of recent texts by tokenizer; evicts the least recently used above `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.lookups = 0
        self.hits = 0
        self._entries: OrderedDict[tuple[str, Text], TokenizedItem] = OrderedDict()

    def get(self, tokenizer: str, text: Text) -> TokenizedItem | None:
        self.lookups += 1
        item = self._entries.get((tokenizer, text))
        if item is not None:
            self.hits += 1
            self._entries.move_to_end((tokenizer, text))
        return item

    def put(self, tokenizer: str, text: Text, item: TokenizedItem) -> None:
        """Cache `item` unless it alone exceeds the limit."""
        size = _entry_bytes(text, item)
        if size > self.max_bytes or (tokenizer, text) in self._entries:
            return
        self._entries[tokenizer, text] = item
        self.bytes += size
        self._evict()

    def resize(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._evict()

    def _evict(self) -> None:
        while self.bytes > self.max_bytes:
            (_, text), item = self._entries.popitem(last=False)
            self.bytes -= _entry_bytes(text, item)


def _entry_bytes(text: Text, item: TokenizedItem) -> int:
    # A Python string takes at most four bytes per character.
    return 4 * count_characters(text) + item.ids.nbytes + ENTRY_OVERHEAD_BYTES
