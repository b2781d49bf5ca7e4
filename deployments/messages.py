"""One frozen type per hop. Nothing here knows HTTP, Ray or an engine.

    Call -> CallBatch -> EncodedBatch -> Batch -> Outputs -> Answer

A *call* is what one request asks of one model; it carries one or more *items* (texts). Calls of
several requests travel together in a batch, and every call gets its own outcome: an Answer or a
ServeError, so one bad call never spoils its neighbours.

What crosses processes is a NamedTuple, which pickles in C; a slotted dataclass asks Python code
for its fields each time, 5 % of the ingress's time as measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.errors import ServeError
from deployments.manifest import Device, TaskName

TokenIds = NDArray[np.int32]  # [T], one item, special tokens included


class Truncation(StrEnum):
    """What to do with a text longer than the model reads."""

    REFUSE = "refuse"
    KEEP_START = "keep-start"
    KEEP_END = "keep-end"


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

    texts: tuple[str, ...]
    fields: tuple[str, ...]
    options: Any
    truncation: Truncation
    deadline_s: float


class BatchKey(NamedTuple):
    """Calls that may travel together: one model version, one task, one lane, similar length."""

    model: ModelRef
    task: TaskName
    device: Device
    long: bool


class CallBatch(NamedTuple):
    """Calls on their way to the tokenizer."""

    key: BatchKey
    calls: tuple[Call, ...]


class EncodedCall(NamedTuple):
    """A call as the engine sees it: token counts instead of texts."""

    lengths: tuple[int, ...]  # tokens per item, special tokens included
    truncated: int  # how many items were cut
    options: Any
    deadline_s: float


class EncodedBatch(NamedTuple):
    """Tokens of many calls, ragged: little-endian int32 ids of all items end to end.

    Bytes and counts instead of lists of lists: a list of 32 sentences is one small buffer to
    copy and nothing to parse. `calls[i]` is a ServeError where call i could not be encoded.
    """

    key: BatchKey
    ids: bytes
    calls: tuple[EncodedCall | ServeError, ...]
    encode_s: float

    def items(self) -> list[TokenIds]:
        """The token ids of every encoded item, in order; views into one buffer."""
        flat = np.frombuffer(self.ids, dtype="<i4")
        lengths = [n for call in self.calls if isinstance(call, EncodedCall) for n in call.lengths]
        return np.split(flat, np.cumsum(lengths[:-1])) if lengths else []


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one forward pass: B items padded to T, the longest of them."""

    input_ids: NDArray[np.int64]  # [B, T]
    attention_mask: NDArray[np.int64]  # [B, T], 0 = padding


@dataclass(frozen=True, slots=True)
class Outputs:
    """What one forward pass computed; row i answers item i of the batch."""

    rows: NDArray[np.float32]  # [B, W]


class Timings(NamedTuple):
    """Where a call's time went; feeds metrics, headers and the log line."""

    encode_s: float = 0.0
    queue_s: float = 0.0  # waiting for the engine, the longest of the call's items
    forward_s: float = 0.0  # in the engine, the longest pass the call was part of
    tokens: int = 0  # real tokens of the call
    batch_items: int = 0  # items in the largest batch the call ran in


class Answer(NamedTuple):
    """A call's result: the task's value and what it took.

    `value` is a float32 array [items, width] or plain JSON values, as the task says.
    """

    value: Any
    compute_type: str
    truncated: int = 0
    timings: Timings = Timings()


Outcome = Answer | ServeError
