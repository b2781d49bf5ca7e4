"""Typed MessagePack encoding of messages. Unlike unpickling, decoding runs no code of the sender.

Deadlines are sent relative to the deadline of their frame, so that a message can be forwarded
without decoding it. Arrays are an extension type with dtype and shape. Errors are sent as kind and
fields.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from deployments.errors import ServeError, forget_frames, rebuild_error
from deployments.messages import (
    BatchKey,
    Call,
    CallBatch,
    CallOutcome,
    CallResult,
    Chat,
    Chunk,
    Completion,
    DecodeRequest,
    GenerationCall,
    GenerationOptions,
    ModelRef,
    PoolRequest,
    PoolState,
    Started,
    TextTokens,
    TokenizedBatch,
    TokenizedCall,
    TokenizeRequest,
)
from deployments.tasks import TASKS
from deployments.transports.channel.frames import Buffer, ChannelError

T = TypeVar("T")

_ARRAY = 1  # extension type: u8 index of the dtype, u8 number of axes, u32 per axis, values
_DTYPES = tuple(map(np.dtype, ("<f4", "<i4", "|i1", "<i8")))
_MAX_AXES = 3


class ErrorFields(NamedTuple):
    """A ServeError as data."""

    kind: str
    state: dict[str, str | int | float | bool | None]  # attributes, `message` included


Errors = dict[int, ErrorFields]  # by the index of the call that failed


class _CallBatch(NamedTuple):
    key: BatchKey
    calls: tuple[Call, ...]


class _TokenizedBatch(NamedTuple):
    key: BatchKey
    ids: bytes
    calls: tuple[TokenizedCall | None, ...]
    errors: Errors
    tokenize_s: float


class _Outcomes(NamedTuple):
    results: dict[int, CallResult]  # by the index of the call
    errors: Errors


class _Chat(NamedTuple):
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    variables: tuple[tuple[str, Any], ...]


class _GenerationCall(NamedTuple):
    model: ModelRef
    text: str | tuple[int, ...] | None  # None: a chat
    chat: bytes | None  # JSON of a _Chat, whose integers may exceed the 64 bits of MessagePack
    options: GenerationOptions
    deadline_s: float  # relative to the deadline of the frame
    client: str
    priority: int


class _StreamEvent(NamedTuple):
    started: Started | None
    chunk: Chunk | None


def encode_call_batch(batch: CallBatch, deadline_s: float) -> bytes:
    calls = [call._replace(deadline_s=call.deadline_s - deadline_s) for call in batch.calls]
    return _ENCODER.encode((batch.key, calls))


def decode_call_batch(body: Buffer, deadline_s: float) -> CallBatch:
    """Decode a batch.

    Every decoding function of this module raises ChannelError for a message of another type.
    """
    key, calls = _decode(_CALL_BATCH, body)
    return CallBatch(key, tuple(_restore_call(call, key, deadline_s) for call in calls))


def encode_tokenized_batch(batch: TokenizedBatch, deadline_s: float) -> bytes:
    calls = [
        None
        if isinstance(call, ServeError)
        else call._replace(deadline_s=call.deadline_s - deadline_s)
        for call in batch.calls
    ]
    fields = (batch.key, batch.ids, calls, _encode_errors(batch.calls), batch.tokenize_s)
    return _ENCODER.encode(fields)


def decode_tokenized_batch(body: Buffer, deadline_s: float) -> TokenizedBatch:
    key, ids, encoded, errors, tokenize_s = _decode(_TOKENIZED_BATCH, body)
    calls = tuple(
        _decode_item_error(errors, index) if call is None else _restore_call(call, key, deadline_s)
        for index, call in enumerate(encoded)
    )
    tokens = sum(sum(call.lengths) for call in calls if isinstance(call, TokenizedCall))
    if tokens * np.dtype(np.int32).itemsize != len(ids):
        raise ChannelError(f"{len(ids)} bytes of token ids for {tokens} tokens")
    return TokenizedBatch(key, ids, calls, tokenize_s)


def encode_outcomes(outcomes: Mapping[int, CallOutcome]) -> bytes:
    """Encode outcomes by the index of their calls."""
    results: dict[int, CallResult] = {}
    errors: Errors = {}
    for index, outcome in outcomes.items():
        if isinstance(outcome, ServeError):
            errors[index] = _error_fields(outcome)
        else:
            results[index] = outcome
    return _ENCODER.encode((results, errors))


def decode_outcomes(body: Buffer) -> dict[int, CallOutcome]:
    results, errors = _decode(_OUTCOMES, body)
    outcomes: dict[int, CallOutcome] = results
    outcomes |= {index: _build_error(fields) for index, fields in errors.items()}
    return outcomes


def encode_generation_call(call: GenerationCall, deadline_s: float) -> bytes:
    is_chat = isinstance(call.prompt, Chat)
    text, chat = (None, msgspec.json.encode(call.prompt)) if is_chat else (call.prompt, None)
    offset_s = call.deadline_s - deadline_s
    fields = (call.model, text, chat, call.options, offset_s, call.client, call.priority)
    return _ENCODER.encode(fields)


def decode_generation_call(body: Buffer, deadline_s: float) -> GenerationCall:
    model, text, chat, options, offset_s, client, priority = _decode(_GENERATION_CALL, body)
    prompt = text if chat is None else Chat(*_decode(_CHAT, chat))
    if prompt is None:
        raise ChannelError("a generation call without a prompt")
    return GenerationCall(model, prompt, options, deadline_s + offset_s, client, priority)


def encode_event(event: Started | Chunk) -> bytes:
    return _ENCODER.encode((event, None) if isinstance(event, Started) else (None, event))


def decode_event(body: Buffer) -> Started | Chunk:
    started, chunk = _decode(_STREAM_EVENT, body)
    event: Started | Chunk | None = started if chunk is None else chunk
    if event is None:
        raise ChannelError("an event without content")
    return event


def encode_message(message: object) -> bytes:
    """Encode a message that MessagePack can represent without a conversion of its fields."""
    return _ENCODER.encode(message)


def decode_tokenize_request(body: Buffer) -> TokenizeRequest:
    return _decode(_TOKENIZE_REQUEST, body)


def decode_text_tokens(body: Buffer) -> tuple[TextTokens, ...]:
    return _decode(_TEXT_TOKENS, body)


def decode_decode_request(body: Buffer) -> DecodeRequest:
    return _decode(_DECODE_REQUEST, body)


def decode_texts(body: Buffer) -> tuple[str, ...]:
    return _decode(_TEXTS, body)


def decode_pool_request(body: Buffer) -> PoolRequest:
    return _decode(_POOL_REQUEST, body)


def decode_pool_state(body: Buffer) -> PoolState:
    return _decode(_POOL_STATE, body)


def decode_completion(body: Buffer) -> Completion:
    return _decode(_COMPLETION, body)


def decode_token_ids(body: Buffer) -> tuple[int, ...]:
    return _decode(_TOKEN_IDS, body)


def encode_error(error: ServeError) -> bytes:
    return _ENCODER.encode(_error_fields(error))


def decode_error(body: Buffer) -> ServeError:
    return _build_error(_decode(_ERROR, body))


def _restore_call(call: Any, key: BatchKey, deadline_s: float) -> Any:
    """Return the call with an absolute deadline, and its options in the type of the task."""
    options = _decode_options(key.task, call.options)
    return call._replace(options=options, deadline_s=deadline_s + call.deadline_s)


def _decode_options(task: str, options: Any) -> Any:
    if task not in TASKS:
        raise ChannelError(f"there is no task `{task}`")
    try:
        return msgspec.convert(options, TASKS[task].options_type)
    except msgspec.ValidationError as exc:
        raise ChannelError(f"options of the task `{task}`: {exc}") from exc


def _encode_errors(outcomes: Sequence[object]) -> Errors:
    return {
        index: _error_fields(outcome)
        for index, outcome in enumerate(outcomes)
        if isinstance(outcome, ServeError)
    }


def _error_fields(error: ServeError) -> ErrorFields:
    """Return an error as data. The error loses its traceback, because it is answered now."""
    forget_frames(error)
    plain = (str, int, float, NoneType)
    state = {
        name: _replace_surrogates(value) if isinstance(value, str) else value
        for name, value in vars(error).items()
        if isinstance(value, plain)
    }
    return ErrorFields(type(error).__name__, state)


def _replace_surrogates(text: str) -> str:
    """Replace what UTF-8 cannot encode, such as invalid bytes in the name of a file."""
    return text.encode("utf-8", "replace").decode()


def _decode_item_error(errors: Errors, index: int) -> ServeError:
    if index not in errors:
        raise ChannelError(f"call {index} has neither a result nor an error")
    return _build_error(errors[index])


def _build_error(fields: ErrorFields) -> ServeError:
    """Build the error. An unknown kind becomes a ServeError."""
    if not isinstance(fields.state.get("message"), str):
        raise ChannelError("an error without a message")
    return rebuild_error(_error_kinds().get(fields.kind, ServeError), fields.state)


@functools.cache
def _error_kinds() -> dict[str, type[ServeError]]:
    kinds = [ServeError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.__name__: kind for kind in kinds}


def _decode(decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T], body: Buffer) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ChannelError(f"a message of another type: {exc}") from exc


def _encode_array(value: object) -> object:
    """Encode an array or numpy number. `msgspec` calls this for types unknown to MessagePack."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"bug: a message contains {type(value).__name__}")
    header = struct.pack(f"<BB{value.ndim}I", _DTYPES.index(value.dtype), value.ndim, *value.shape)
    return msgspec.msgpack.Ext(_ARRAY, header + value.tobytes())


def _decode_array(code: int, data: memoryview) -> NDArray[Any]:
    """Copy an array out of the message. A view would keep the whole message in memory."""
    if code != _ARRAY or len(data) < 2 or data[0] >= len(_DTYPES) or data[1] > _MAX_AXES:
        raise ChannelError(f"extension {code} is not an array")
    dtype, start = _DTYPES[data[0]], 2 + 4 * data[1]
    try:
        shape = struct.unpack_from(f"<{data[1]}I", data, 2)
        return np.frombuffer(data, dtype, offset=start).reshape(shape).copy()
    except (struct.error, ValueError) as exc:
        raise ChannelError(f"an array that is not valid: {exc}") from exc


def _check_array(expected: Any, value: object) -> object:
    """Check a field that is declared as an array; `msgspec` calls this."""
    dtype = expected.__args__[1].__args__[0]
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        raise ChannelError(f"expected an array of {dtype.__name__}")
    return value


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def _decoder(message: type[T]) -> msgspec.msgpack.Decoder[T]:
    return msgspec.msgpack.Decoder(message, ext_hook=_decode_array, dec_hook=_check_array)


_CALL_BATCH = _decoder(_CallBatch)
_TOKENIZED_BATCH = _decoder(_TokenizedBatch)
_OUTCOMES: msgspec.msgpack.Decoder[Any] = _decoder(_Outcomes)
_GENERATION_CALL = _decoder(_GenerationCall)
_CHAT = msgspec.json.Decoder(_Chat)
_STREAM_EVENT = _decoder(_StreamEvent)
_TOKENIZE_REQUEST = _decoder(TokenizeRequest)
_TEXT_TOKENS = _decoder(tuple[TextTokens, ...])
_DECODE_REQUEST = _decoder(DecodeRequest)
_TEXTS = _decoder(tuple[str, ...])
_COMPLETION = _decoder(Completion)
_TOKEN_IDS = _decoder(tuple[int, ...])
_POOL_REQUEST = _decoder(PoolRequest)
_POOL_STATE = _decoder(PoolState)
_ERROR = _decoder(ErrorFields)
