"""Messages between the ingress and the replicas, one frozen type per hop. No HTTP, Ray or engines.

    encoders:    Call -> CallBatch -> TokenizedBatch -> Batch -> Outputs -> CallResult
    generators:  GenerationCall -> Started, Chunk, Chunk, ... (streamed) | Completion (unary)

A *call* is the work of one request on one model. A call to an encoder has one or more *items*:
texts or text pairs. A micro-batch carries calls of several requests. Every call gets its own
outcome, so that one invalid call does not fail the others. A call to a generator has one prompt
and one answer; a request for several answers makes several calls.

Messages between processes are NamedTuples, which pickle in C. Slotted dataclasses pickle in Python
code, which took 5 % of the ingress time.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

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
    """Tokens of one item. The second segment extends to the last token."""

    ids: TokenIds
    second_segment_start: int  # index of the segment's first token; T if there is no such segment


class Truncation(StrEnum):
    """Handling of a text that exceeds the model's limit."""

    REFUSE = "refuse"
    KEEP_START = "keep-start"
    KEEP_END = "keep-end"


# Interactive work runs first. Batch work gets a small share of the time while both kinds wait.
# Messages between processes have the index of a priority.
Priority = Literal["interactive", "batch"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)


class Windowing(NamedTuple):
    """Sliding windows of a task that returns character positions.

    If `tokens` is None, the model's limit applies. The stride is at most half of the text tokens of
    a window, so that windows advance.
    """

    tokens: int | None = None  # per item at most, special tokens included
    stride: int | None = None  # tokens that adjacent windows share; None: one item per text
    # Limit of the first segment of a pair. The second segment is split into windows.
    first_tokens: int | None = None


class TokenOffsets(NamedTuple):
    """Positions of the tokens of one item in its text."""

    text: int  # index of the text in the call; the item is a window of this text
    offsets: NDArray[np.int32]  # [T, 2] characters of the token's segment, end exclusive
    segments: NDArray[np.int8]  # [T] 0 or 1; -1 for special tokens
    words: NDArray[np.int32]  # [T] index of the word in its segment; -1 for special tokens


class ModelRef(NamedTuple):
    """A model and its exact version."""

    id: str
    version: str

    @property
    def name(self) -> str:
        """The name that always selects this version, independent of the plan."""
        return f"{self.id}@{self.version}"


class Call(NamedTuple):
    """Parsed work of one request that is within the limits.

    `texts` are the items in order; `fields[i]` is the request path of item i, for errors.
    `options` is the task's own frozen type, passed to its `decode`.
    """

    texts: tuple[Text, ...]
    fields: tuple[str, ...]
    options: Any
    truncation: Truncation
    deadline_s: float  # see deployments.deadlines
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
    """A call with token counts instead of texts."""

    lengths: tuple[int, ...]  # tokens per item, special tokens included
    truncated: int  # items that were shortened to fit
    options: Any
    deadline_s: float
    # As in TokenizedItem; empty if no item has a second segment.
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


class EncoderTimings(NamedTuple):
    """Durations of an encoder call, for metrics, response headers and the log line."""

    tokenize_s: float = 0.0
    queue_s: float = 0.0  # longest wait of the call's items for a free engine thread
    forward_s: float = 0.0  # the longest forward pass of the call
    tokens: int = 0  # tokens of the call without padding
    batch_items: int = 0  # items of the largest batch of the call


class TokenizeRequest(NamedTuple):
    """Texts to inspect as tokens."""

    model: ModelRef
    texts: tuple[str, ...]
    special: bool  # include special tokens
    client: str = ""  # as in Call
    priority: int = 0


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
    client: str = ""
    priority: int = 0


class CallResult(NamedTuple):
    """Result of a call.

    `value` is a float32 array [items, width] or plain JSON values, depending on the task.
    """

    value: Any
    compute_type: str
    truncated: int = 0
    timings: EncoderTimings = EncoderTimings()


CallOutcome = CallResult | ServeError


class Chat(NamedTuple):
    """A conversation. The chat template of the model renders it as a prompt."""

    messages: tuple[dict[str, Any], ...]  # {"role", "content", ...} with string contents
    tools: tuple[dict[str, Any], ...] = ()  # function declarations in OpenAI's format


# Text, token ids (no special tokens are added), or a conversation.
Prompt = str | tuple[int, ...] | Chat


def count_prompt(prompt: Prompt) -> int:
    """Count the characters or token ids of a prompt; estimate the characters of a rendered chat."""
    if not isinstance(prompt, Chat):
        return len(prompt)
    messages = ((each["content"], each.get("tool_calls", "")) for each in prompt.messages)
    tools = len(str(prompt.tools)) if prompt.tools else 0
    return tools + sum(len(content) + len(str(calls)) for content, calls in messages)


class SamplingParams(NamedTuple):
    """Parameters of token selection. The defaults sample from the unmodified distribution."""

    temperature: float = 1.0  # 0: greedy, always the most likely token
    top_k: int | None = None  # at least 1: keep the k most likely tokens
    top_p: float | None = None  # in (0, 1]: keep the smallest set with this probability
    min_p: float | None = None  # in [0, 1]: minimum probability relative to the maximum
    typical_p: float | None = None  # in (0, 1]: locally typical sampling, arXiv:2202.00666
    repetition_penalty: float = 1.0  # above 0; for tokens of prompt and answer, arXiv:1909.05858
    frequency_penalty: float = 0.0  # per occurrence in the answer, as OpenAI defines it
    presence_penalty: float = 0.0  # once per token of the answer, as OpenAI defines it
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    seed: int | None = None  # None: a random seed, reported in `Started`


# When beam search stops. True: as many answers are finished as there are beams. False: no running
# beam scores better than the worst finished answer. "never": no running beam can ever do so.
EarlyStopping: TypeAlias = bool | Literal["never"]


class BeamSearchParams(NamedTuple):
    """Parameters of beam search."""

    num_beams: int  # at least 2
    length_penalty: float = 1.0  # above 0 favors longer answers, below 0 shorter ones
    early_stopping: EarlyStopping = False
    is_explicit: bool = True  # False: the model's default; fewer KV slots then reduce `num_beams`


class Grammar(NamedTuple):
    """A grammar that constrains the generated text."""

    kind: Literal["json_object", "json_schema", "regex"]
    value: str = ""  # JSON schema as text, or regular expression


class Languages(NamedTuple):
    """Language tokens of a multilingual encoder-decoder model, as token ids."""

    source: int  # replaces the language token that the tokenizer adds to the prompt
    target: int  # first token of the output


class GenerationOptions(NamedTuple):
    """Options of a generation request, independent of the API."""

    sampling: SamplingParams = SamplingParams()
    beam_search: BeamSearchParams | None = None  # replaces sampling; cannot be streamed
    no_repeat_ngram_size: int = 0  # n-grams of this size do not repeat; 0: disabled
    max_new_tokens: int | None = None  # None: the remaining context
    min_new_tokens: int = 0  # the end token and stop strings have no effect before this many
    stop: tuple[str, ...] = ()  # the text ends at the first stop string
    include_stop_string: bool = False  # True as in TGI, False as in OpenAI
    grammar: Grammar | None = None
    logprobs: int | None = None  # top logprobs per token; None: no logprobs
    prompt_logprobs: bool = False  # include the prompt tokens with their logprobs
    truncate_prompt_tokens: int | None = None  # keep this many of the last prompt tokens
    truncation: Truncation = Truncation.REFUSE  # for a prompt above the maximum length
    languages: Languages | None = None  # None: the defaults of the checkpoint
    prefix_cache_scope: str = ""  # prompts of one scope share cached prefixes


class GenerationCall(NamedTuple):
    """A request for one answer. `deadline_s`: see deployments.deadlines."""

    model: ModelRef
    prompt: Prompt
    options: GenerationOptions
    deadline_s: float
    client: str = ""  # as in Call
    priority: int = 0  # index in PRIORITIES


class TopLogprob(NamedTuple):
    """One of the most likely tokens at a position, with its text in isolation."""

    id: int
    text: str
    logprob: float
    special: bool = False


class Token(NamedTuple):
    """One token of an answer or of a prompt.

    `text` is the text that the token completes. It is empty for a special token, and for a token
    that ends within a character. Log-probabilities are the model's, before penalties and
    temperature; None if not requested, and for the first token of a prompt.
    """

    id: int
    text: str
    logprob: float | None = None
    special: bool = False
    alternatives: tuple[TopLogprob, ...] = ()  # most likely first


class FinishReason(StrEnum):
    LENGTH = "length"  # maximum number of tokens
    END = "end"  # end token, or the grammar is complete
    STOP = "stop"  # stop string


class Started(NamedTuple):
    """The prompt is prefilled. First message of a stream."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens from the prefix cache
    seed: int
    compute_type: str  # such as "cpu-int4"
    prompt: tuple[Token, ...] = ()  # empty unless `prompt_logprobs` is set


class GenerationTimings(NamedTuple):
    """Durations of the phases of an answer, in seconds."""

    queue_s: float = 0.0  # from submission until a KV slot was free
    prefill_s: float = 0.0  # from the KV slot to the first token
    decode_s: float = 0.0  # from the first to the last token
    tokenize_s: float = 0.0  # before submission: chat template, and text to token ids


class Finished(NamedTuple):
    reason: FinishReason
    generated_tokens: int  # including the end token
    timings: GenerationTimings


class Chunk(NamedTuple):
    """The next part of a stream: complete characters of text and the tokens since the last chunk.

    Text that may begin a stop string is held back, so the text of a token may arrive with a later
    chunk. The last chunk has `finished`.
    """

    text: str
    tokens: tuple[Token, ...]
    finished: Finished | None = None


class Completion(NamedTuple):
    """A complete answer."""

    started: Started
    text: str
    tokens: tuple[Token, ...]
    finished: Finished


# A job produces `Started`, then chunks until one has `finished`. A ServeError may end the stream at
# any point.
StreamEvent: TypeAlias = Started | Chunk | ServeError


def merge_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Merge consecutive chunks of one answer; there is at least one."""
    if len(chunks) == 1:
        return chunks[0]
    text = "".join(chunk.text for chunk in chunks)
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    return Chunk(text, tokens, chunks[-1].finished)
