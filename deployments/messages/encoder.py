"""Messages of calls to encoders, and of calls that use only the tokenizer.

    Call -> CallBatch -> TokenizedBatch -> Batch -> Outputs -> CallResult

A call has one or more *items*: texts or text pairs. A micro-batch carries calls of several
requests. Every call gets its own outcome, so that one invalid call does not fail the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.artifacts.types import Device
from deployments.errors import ServeError
from deployments.messages.shared import ModelRef, Truncation

TokenIds = NDArray[np.int32]  # [T], one item, special tokens included
TextPair = tuple[str, str]  # two segments of one item, such as a query and a document
# One item: a text, a pair, or a pair and an instruction for a model that reads one.
Text = str | tuple[str, ...]


def count_characters(text: Text) -> int:
    """Count the characters of a text, or of all parts of a pair."""
    return len(text) if isinstance(text, str) else sum(map(len, text))


class TokenizedItem(NamedTuple):
    """Tokens of one item. The second segment extends to the last token."""

    ids: TokenIds
    second_segment_start: int  # index of the segment's first token; T without a second segment


class Windowing(NamedTuple):
    """Sliding windows of a task that returns character positions.

    If `tokens` is None, the model's limit applies. A stride above half of the text tokens of a
    window is reduced to this half, so that windows advance.
    """

    tokens: int | None = None  # limit per item, special tokens included
    stride: int | None = None  # tokens that adjacent windows share; None: one item per text
    # Maximum tokens of the first segment of a pair. The second segment is split into windows.
    first_tokens: int | None = None


class TokenOffsets(NamedTuple):
    """Positions of the tokens of one item in its text."""

    text: int  # index of the text in the call; the item is a window of this text
    offsets: NDArray[np.int32]  # [T, 2] characters of the token's segment, end exclusive
    segments: NDArray[np.int8]  # [T] 0 or 1; -1 for special tokens
    words: NDArray[np.int32]  # [T] index of the word in its segment; -1 for special tokens


class Call(NamedTuple):
    """Work of one request. The ingress has parsed it and checked its limits.

    `texts` are the items in order. `fields[i]` names item i in the request, for error messages.
    Each task has its own type of `options`, which the task's `decode` method receives.
    """

    texts: tuple[Text, ...]
    fields: tuple[str, ...]
    options: Any
    truncation: Truncation
    deadline_s: float  # time.monotonic, see deployments.deadlines
    windowing: Windowing | None = None  # for tasks that return character positions
    client: str = ""  # name of the client; queues serve clients in equal shares
    priority: int = 0  # index in PRIORITIES


class BatchKey(NamedTuple):
    """Key of a micro-batch: calls with an equal key share a micro-batch."""

    model: ModelRef
    task: str
    device: Device
    long: bool  # whether the call is long and is therefore sent alone


class CallBatch(NamedTuple):
    """A micro-batch of calls, sent to the tokenizer."""

    key: BatchKey
    calls: tuple[Call, ...]
    backlog: int = 0  # characters that wait in the ingress for the same device


class TokenizedCall(NamedTuple):
    """A call with token counts instead of texts. `TokenizedBatch.ids` has the tokens."""

    lengths: tuple[int, ...]  # tokens per item, special tokens included
    truncated: int  # number of items that were shortened to the token limit
    options: Any
    deadline_s: float
    # Per item, index of the first token of the second segment. Empty if no item has such a segment.
    second_segment_start: tuple[int, ...] = ()
    token_offsets: tuple[TokenOffsets, ...] = ()  # one per item if the call has a `windowing`
    client: str = ""
    priority: int = 0


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


class CallTimings(NamedTuple):
    """Durations of an encoder call, or of the generations of one request.

    Metrics, response headers and the log line contain them.
    """

    tokenize_s: float = 0.0  # texts to token ids; for a generation also the chat template
    queue_s: float = 0.0  # longest wait of an item for a thread, or of a generation for a KV slot
    forward_s: float = 0.0  # longest forward pass; longest prefill and decode of a generation
    tokens: int = 0  # without padding; for generations, tokens of prompts and answers
    batch_items: int = 0  # items of the largest batch; 0 for a generation


class TokenizeRequest(NamedTuple):
    """Request for the tokens of each text, without a forward pass."""

    model: ModelRef
    texts: tuple[str, ...]
    special: bool  # include special tokens
    client: str = ""  # name of the client; queues serve clients in equal shares
    priority: int = 0


class TextTokens(NamedTuple):
    """The T tokens of one text, in columns."""

    ids: TokenIds
    offsets: NDArray[np.int32]  # [T, 2] characters, end exclusive; empty for special tokens
    special: dict[int, str]  # by index in `ids`: the vocabulary entry of a special token


class DecodeRequest(NamedTuple):
    """Token ids to decode to text."""

    model: ModelRef
    sequences: tuple[tuple[int, ...], ...]
    skip_special: bool  # omit special tokens
    client: str = ""
    priority: int = 0
    trim_special: bool = False  # omit padding, and special tokens before and after a text


class CallResult(NamedTuple):
    """Result of a call.

    Depending on the task, `value` is a float32 array [items, width], a list with one float32 array
    per item, or plain JSON values.
    """

    value: Any
    compute_type: str
    truncated: int = 0
    timings: CallTimings = CallTimings()


CallOutcome = CallResult | ServeError
