"""One frozen type per hop. Nothing here knows HTTP, Ray or an engine.

    Call -> CallBatch -> TokenizedBatch -> Batch -> Outputs -> CallResult

A *call* is what one request asks of one model; it carries one or more *items* (texts, or pairs of
them). Calls of several requests travel together in a batch, and every call gets its own outcome: an
CallResult or a ServeError, so one bad call never spoils its neighbours.

What crosses processes is a NamedTuple, which pickles in C; a slotted dataclass asks Python code
for its fields each time, 5 % of the ingress's time as measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.artifacts.types import Device
from deployments.errors import ServeError

TokenIds = NDArray[np.int32]  # [T], one item, special tokens included
TextPair = tuple[str, str]  # two segments of one item, such as a query and a document
Text = str | TextPair  # what becomes one item


def count_characters(text: Text) -> int:
    """Characters of a text, of both segments where it is a pair."""
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])


class TokenizedItem(NamedTuple):
    """One item's tokens; the second segment, where there is one, runs to the end."""

    ids: TokenIds
    second_segment_start: int  # index of the first token of the second segment; T without one


class Truncation(StrEnum):
    """What to do with a text longer than the model reads."""

    REFUSE = "refuse"
    KEEP_START = "keep-start"
    KEEP_END = "keep-end"


class Windowing(NamedTuple):
    """How the texts of a task that answers in characters become items, with their layouts.

    `None` leaves it at what the model reads. A stride is never more than half of a window's room,
    so that windows advance.
    """

    tokens: int | None = None  # of an item at most, special tokens included
    stride: int | None = None  # tokens neighbouring windows share; None: one item per text
    # A pair's first segment is cut to that many; its second one gets the windows.
    first_tokens: int | None = None


class TokenOffsets(NamedTuple):
    """Where the tokens of one item stand in its text."""

    text: int  # index of the call's text that the item is a window of
    offsets: NDArray[np.int32]  # [T, 2] characters of the token's segment, end exclusive
    segments: NDArray[np.int8]  # [T] 0 or 1; -1 for special tokens
    words: NDArray[np.int32]  # [T] index of the word in its segment; -1 for special tokens


class ModelRef(NamedTuple):
    """A model and the exact version that answers."""

    id: str
    version: str


class Call(NamedTuple):
    """One request's work, parsed and within limits.

    `texts` are the items in order; `fields[i]` is the request path of item i, for errors.
    `options` is the task's own frozen type and reaches its `decode` untouched.
    `deadline_s` is wall-clock time (time.time), because it crosses processes.
    """

    texts: tuple[Text, ...]
    fields: tuple[str, ...]
    options: Any
    truncation: Truncation
    deadline_s: float
    windowing: Windowing | None = None  # for tasks that answer in characters


class BatchKey(NamedTuple):
    """Calls that may travel together: one model version, one task, one encoder, similar length."""

    model: ModelRef
    task: str
    device: Device
    long: bool


class CallBatch(NamedTuple):
    """Calls on their way to the tokenizer."""

    key: BatchKey
    calls: tuple[Call, ...]


class TokenizedCall(NamedTuple):
    """A call as the engine sees it: token counts instead of texts."""

    lengths: tuple[int, ...]  # tokens per item, special tokens included
    truncated: int  # how many items were cut
    options: Any
    deadline_s: float
    second_segment_start: tuple[
        int, ...
    ] = ()  # as in TokenizedItem; empty when no item has a second segment
    token_offsets: tuple[TokenOffsets, ...] = ()  # one per item where the call has a `windowing`


class TokenizedBatch(NamedTuple):
    """Tokens of many calls, ragged: little-endian int32 ids of all items end to end.

    Bytes and counts instead of lists of lists: a list of 32 sentences is one small buffer to
    copy and nothing to parse. `calls[i]` is a ServeError where call i could not be encoded.
    """

    key: BatchKey
    ids: bytes
    calls: tuple[TokenizedCall | ServeError, ...]
    tokenize_s: float

    def items(self) -> list[TokenizedItem]:
        """Every encoded item, in order; views into one buffer."""
        flat = np.frombuffer(self.ids, dtype="<i4")
        items: list[TokenizedItem] = []
        start = 0
        for call in self.calls:
            if isinstance(call, TokenizedCall):
                seconds = call.second_segment_start or call.lengths
                for length, second_segment_start in zip(call.lengths, seconds, strict=True):
                    items.append(TokenizedItem(flat[start : start + length], second_segment_start))
                    start += length
        return items


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one forward pass: B items padded to T, the longest of them."""

    input_ids: NDArray[np.int64]  # [B, T]
    attention_mask: NDArray[np.int64]  # [B, T], 0 = padding
    token_type_ids: NDArray[np.int64]  # [B, T], 1 = second segment
    lengths: tuple[int, ...]  # [B], real tokens of each item
    # Of a model that pools: the vectors that it would pool, instead of one for each item.
    unpooled: bool = False


@dataclass(frozen=True, slots=True)
class Outputs:
    """What one forward pass computed, padding removed; `items[i]` answers item i of the batch.

    Shapes are those of `ModelHead`: [W], [T_i, W], [T_i, 2] or [M_i, W]; [T_i, W] also when
    the batch asks for `unpooled`. A pooled head gives one array [B, W], which is the sequence of
    its rows.
    """

    items: Sequence[NDArray[np.float32]]


class EncoderTimings(NamedTuple):
    """Where a call's time went; feeds metrics, headers and the log line."""

    tokenize_s: float = 0.0
    queue_s: float = 0.0  # waiting for the engine, the longest of the call's items
    forward_s: float = 0.0  # in the engine, the longest pass the call was part of
    tokens: int = 0  # real tokens of the call
    batch_items: int = 0  # items in the largest batch the call ran in


class TokenizeRequest(NamedTuple):
    """Texts whose tokens somebody wants to see."""

    model: ModelRef
    texts: tuple[str, ...]
    special: bool  # together with the special tokens that the model reads


class TextTokens(NamedTuple):
    """The T tokens of one text, in columns: they may be many."""

    ids: TokenIds
    offsets: NDArray[np.int32]  # [T, 2] characters, end exclusive; nothing for special tokens
    special: dict[int, str]  # how the vocabulary spells each special token, by its place


class DecodeRequest(NamedTuple):
    """Token ids whose text somebody wants to read."""

    model: ModelRef
    sequences: tuple[tuple[int, ...], ...]
    skip_special: bool  # leave the special tokens out of the text


class CallResult(NamedTuple):
    """A call's result: the task's value and what it took.

    `value` is a float32 array [items, width] or plain JSON values, as the task says.
    """

    value: Any
    compute_type: str
    truncated: int = 0
    timings: EncoderTimings = EncoderTimings()


Outcome = CallResult | ServeError
