"""Messages of the encoder path, one frozen type per hop. No HTTP, Ray or engine types.

    Call -> CallBatch -> TokenizedBatch -> Batch -> Outputs -> CallResult

A *call* is the work of one request on one model. It has one or more *items*: texts or text pairs.
A micro-batch carries calls of several requests. Every call gets its own outcome, a CallResult or a
ServeError, so that one invalid call does not fail the others.

Messages between processes are NamedTuples, which pickle in C. Slotted dataclasses pickle in Python
code: 5 % of the ingress time, measured. Generation messages are in generation/messages.py.
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
Text = str | TextPair  # one item


def count_characters(text: Text) -> int:
    """Count the characters of a text, or of both segments of a pair."""
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])


class TokenizedItem(NamedTuple):
    """Tokens of one item; the second segment extends to the end."""

    ids: TokenIds
    second_segment_start: int  # index of its first token; T without a second segment


class Truncation(StrEnum):
    """Handling of a text that exceeds the model's limit."""

    REFUSE = "refuse"
    KEEP_START = "keep-start"
    KEEP_END = "keep-end"


class Windowing(NamedTuple):
    """Sliding windows of a task that returns character positions.

    None selects the model's limit. The stride is at most half of the free tokens of a window, so
    that windows advance.
    """

    tokens: int | None = None  # per item at most, special tokens included
    stride: int | None = None  # tokens that adjacent windows share; None: one item per text
    # Limit of the first segment of a pair. The second segment is split into windows.
    first_tokens: int | None = None


class TokenOffsets(NamedTuple):
    """Positions of the tokens of one item in its text."""

    text: int  # index of the call's text that the item is a window of
    offsets: NDArray[np.int32]  # [T, 2] characters of the token's segment, end exclusive
    segments: NDArray[np.int8]  # [T] 0 or 1; -1 for special tokens
    words: NDArray[np.int32]  # [T] index of the word in its segment; -1 for special tokens


class ModelRef(NamedTuple):
    """A model and its exact version."""

    id: str
    version: str


class Call(NamedTuple):
    """Parsed work of one request, within the limits.

    `texts` are the items in order; `fields[i]` is the request path of item i, for errors.
    `options` is the task's own frozen type, passed to its `decode`.
    """

    texts: tuple[Text, ...]
    fields: tuple[str, ...]
    options: Any
    truncation: Truncation
    deadline_s: float  # see deployments.deadlines
    windowing: Windowing | None = None  # for tasks that return character positions


class BatchKey(NamedTuple):
    """Calls with the same key share a micro-batch."""

    model: ModelRef
    task: str
    device: Device
    long: bool


class CallBatch(NamedTuple):
    """A micro-batch of calls, sent to the tokenizer."""

    key: BatchKey
    calls: tuple[Call, ...]


class TokenizedCall(NamedTuple):
    """A call with token counts instead of texts."""

    lengths: tuple[int, ...]  # tokens per item, special tokens included
    truncated: int  # items that were shortened to fit
    options: Any
    deadline_s: float
    # As in TokenizedItem; empty if no item has a second segment.
    second_segment_start: tuple[int, ...] = ()
    token_offsets: tuple[TokenOffsets, ...] = ()  # one per item if the call has a `windowing`


class TokenizedBatch(NamedTuple):
    """Tokens of many calls: little-endian int32 ids of all items in one buffer.

    One buffer is cheaper to send than lists of lists. `calls[i]` is a ServeError if call i could
    not be tokenized.
    """

    key: BatchKey
    ids: bytes
    calls: tuple[TokenizedCall | ServeError, ...]
    tokenize_s: float

    def items(self) -> list[TokenizedItem]:
        """Return the items of all tokenized calls, in order, as views into the buffer."""
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
    """Inputs of one forward pass: B items padded to T, the length of the longest."""

    input_ids: NDArray[np.int64]  # [B, T]
    attention_mask: NDArray[np.int64]  # [B, T], 0 = padding
    token_type_ids: NDArray[np.int64]  # [B, T], 1 = second segment
    lengths: tuple[int, ...]  # [B], tokens of each item without padding
    unpooled: bool = False  # request one vector per token from a pooling model


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of one forward pass without padding; `items[i]` belongs to item i of the batch.

    Shapes are those of ModelHead: [W], [T_i, W], [T_i, 2] or [M_i, W]. An unpooled batch returns
    [T_i, W]. A pooling head returns one array [B, W], the sequence of its rows.
    """

    items: Sequence[NDArray[np.float32]]


class EncoderTimings(NamedTuple):
    """Durations of an encoder call, for metrics, response headers and the log line."""

    tokenize_s: float = 0.0
    queue_s: float = 0.0  # until an engine thread was free, the longest of the call's items
    forward_s: float = 0.0  # the longest forward pass of the call
    tokens: int = 0  # tokens of the call without padding
    batch_items: int = 0  # items of the largest batch of the call


class TokenizeRequest(NamedTuple):
    """Texts to inspect as tokens."""

    model: ModelRef
    texts: tuple[str, ...]
    special: bool  # include special tokens


class TextTokens(NamedTuple):
    """The T tokens of one text, in columns."""

    ids: TokenIds
    offsets: NDArray[np.int32]  # [T, 2] characters, end exclusive; empty for special tokens
    special: dict[int, str]  # vocabulary entry of each special token by its index


class DecodeRequest(NamedTuple):
    """Token ids to decode to text."""

    model: ModelRef
    sequences: tuple[tuple[int, ...], ...]
    skip_special: bool  # omit special tokens


class CallResult(NamedTuple):
    """Result of a call.

    `value` is a float32 array [items, width] or plain JSON values, depending on the task.
    """

    value: Any
    compute_type: str
    truncated: int = 0
    timings: EncoderTimings = EncoderTimings()


Outcome = CallResult | ServeError
