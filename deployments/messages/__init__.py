"""Messages between the ingress and the replicas. This package imports no HTTP, Ray or engines.

    encoder.py      calls to encoders, and calls that use only the tokenizer
    generation.py   calls to generators, and the events of their streams
    pool.py         the models in the memory of a replica
    shared.py       model, priority and truncation, used by all messages

Other packages import the messages from here. A *call* is work for one request on one model.

Messages between processes are NamedTuples. With `transport: handle` they are pickled, in C. Slotted
dataclasses pickle in Python code, which took 5 % of the ingress time. With `transport: channel`
nothing is pickled.
"""

from __future__ import annotations

from deployments.messages.encoder import (
    BatchKey,
    Call,
    CallBatch,
    CallOutcome,
    CallResult,
    CallTimings,
    DecodeRequest,
    Text,
    TextPair,
    TextTokens,
    TokenIds,
    TokenizedBatch,
    TokenizedCall,
    TokenizedItem,
    TokenizeRequest,
    TokenOffsets,
    Windowing,
    count_characters,
)
from deployments.messages.generation import (
    CALL_ARGUMENTS,
    CALL_CLOSE,
    CALL_ID,
    CALL_OPEN,
    CALL_STRING,
    TEMPLATE_ARGUMENTS,
    BeamSearchParams,
    Chat,
    Chunk,
    Completion,
    EarlyStopping,
    Finished,
    FinishReason,
    GenerationCall,
    GenerationOptions,
    GenerationTimings,
    Grammar,
    Languages,
    Prompt,
    SamplingParams,
    Started,
    StreamEvent,
    Token,
    TopLogprob,
    count_prompt,
    estimate_prompt_tokens,
    join_reasoning,
    join_reasoning_and_text,
    merge_chunks,
)
from deployments.messages.pool import (
    LoadedModel,
    PoolRequest,
    PoolState,
)
from deployments.messages.shared import (
    CHARACTERS_PER_TOKEN,
    PRIORITIES,
    ModelRef,
    Priority,
    Sender,
    Truncation,
)

__all__ = [
    "CALL_ARGUMENTS",
    "CALL_CLOSE",
    "CALL_ID",
    "CALL_OPEN",
    "CALL_STRING",
    "CHARACTERS_PER_TOKEN",
    "PRIORITIES",
    "TEMPLATE_ARGUMENTS",
    "BatchKey",
    "BeamSearchParams",
    "Call",
    "CallBatch",
    "CallOutcome",
    "CallResult",
    "CallTimings",
    "Chat",
    "Chunk",
    "Completion",
    "DecodeRequest",
    "EarlyStopping",
    "FinishReason",
    "Finished",
    "GenerationCall",
    "GenerationOptions",
    "GenerationTimings",
    "Grammar",
    "Languages",
    "LoadedModel",
    "ModelRef",
    "PoolRequest",
    "PoolState",
    "Priority",
    "Prompt",
    "SamplingParams",
    "Sender",
    "Started",
    "StreamEvent",
    "Text",
    "TextPair",
    "TextTokens",
    "Token",
    "TokenIds",
    "TokenOffsets",
    "TokenizeRequest",
    "TokenizedBatch",
    "TokenizedCall",
    "TokenizedItem",
    "TopLogprob",
    "Truncation",
    "Windowing",
    "count_characters",
    "count_prompt",
    "estimate_prompt_tokens",
    "join_reasoning",
    "join_reasoning_and_text",
    "merge_chunks",
]
