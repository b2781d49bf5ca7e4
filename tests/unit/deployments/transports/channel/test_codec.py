from __future__ import annotations

import os
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest

from deployments import errors
from deployments.artifacts.types import Device, TaskName
from deployments.errors import (
    DeadlineExceeded,
    InvalidField,
    ModelLoading,
    Overloaded,
    ServeError,
)
from deployments.messages import (
    BatchKey,
    BeamSearchParams,
    Call,
    CallBatch,
    CallResult,
    CallTimings,
    Chat,
    Chunk,
    Completion,
    DecodeRequest,
    Finished,
    FinishReason,
    GenerationCall,
    GenerationOptions,
    GenerationTimings,
    Grammar,
    Languages,
    ModelRef,
    SamplingParams,
    Started,
    TextTokens,
    Token,
    TokenizedBatch,
    TokenizedCall,
    TokenizeRequest,
    TokenOffsets,
    TopLogprob,
    Truncation,
    Windowing,
)
from deployments.tasks import TASKS
from deployments.tasks.embedding import EmbeddingOptions
from deployments.tasks.fill_mask import FillMaskOptions
from deployments.tasks.question_answering import QuestionOptions, SpanOptions
from deployments.tasks.ranking import RankingOptions
from deployments.tasks.text_classification import ClassificationOptions
from deployments.tasks.token_classification import EntityOptions
from deployments.tasks.zero_shot import ZeroShotOptions
from deployments.transports.channel import codec
from deployments.transports.channel.frames import ChannelError

MODEL = ModelRef("tiny/model", "0123456789ab")
DEADLINE_S = 1_000.0
OPTIONS: dict[str, Any] = {
    TaskName.FEATURE_EXTRACTION: EmbeddingOptions(normalize=True, dimensions=8),
    TaskName.SENTENCE_SIMILARITY: None,
    TaskName.TEXT_CLASSIFICATION: ClassificationOptions(2, "softmax"),
    TaskName.ZERO_SHOT_CLASSIFICATION: ZeroShotOptions(("a",), ("b", "c"), True, False),
    TaskName.TEXT_RANKING: RankingOptions(True, ("a", "b")),
    TaskName.TOKEN_CLASSIFICATION: EntityOptions("simple", ("O",), ("a",), True),
    TaskName.FILL_MASK: FillMaskOptions(5, (), ("inputs",), True),
    TaskName.QUESTION_ANSWERING: QuestionOptions(("context",), SpanOptions(), True),
    "token-embeddings": None,
    "sparse-embeddings": None,
}


def key(task: str = TaskName.FEATURE_EXTRACTION) -> BatchKey:
    return BatchKey(MODEL, task, Device.CPU, long=False)


def tokenized(*calls: TokenizedCall | ServeError, task: str) -> TokenizedBatch:
    tokens = sum(sum(call.lengths) for call in calls if isinstance(call, TokenizedCall))
    return TokenizedBatch(key(task), np.arange(tokens, dtype="<i4").tobytes(), calls, 0.25)


def test_every_task_has_options_here() -> None:
    assert set(OPTIONS) == set(TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_call_batch_round_trips_with_the_options_of_its_task(task: str) -> None:
    call = Call(
        ("text", ("first", "second")),
        ("inputs[0]", "inputs[1]"),
        OPTIONS[task],
        Truncation.KEEP_END,
        DEADLINE_S - 2,
        Windowing(tokens=16, stride=4),
    )
    batch = CallBatch(key(task), (call, call._replace(windowing=None, deadline_s=DEADLINE_S)))
    decoded = codec.decode_call_batch(codec.encode_call_batch(batch, DEADLINE_S), DEADLINE_S)
    assert decoded == batch
    assert type(decoded.calls[0].options) is type(OPTIONS[task])


def test_deadlines_are_relative_to_the_frame() -> None:
    call = Call(("a",), ("inputs",), None, Truncation.REFUSE, DEADLINE_S - 2)
    batch = CallBatch(key(TaskName.SENTENCE_SIMILARITY), (call,))
    decoded = codec.decode_call_batch(codec.encode_call_batch(batch, DEADLINE_S), 50.0)
    assert decoded.calls[0].deadline_s == 48.0


@pytest.mark.parametrize("task", TASKS)
def test_tokenized_batch_round_trips_with_failed_calls(task: str) -> None:
    offsets = TokenOffsets(
        0,
        np.array([[0, 1], [1, 2]], np.int32),
        np.array([0, -1], np.int8),
        np.array([0, -1], np.int32),
    )
    call = TokenizedCall((2,), 1, OPTIONS[task], DEADLINE_S, (1,), (offsets,))
    batch = tokenized(call, Overloaded("full"), task=task)
    body = codec.encode_tokenized_batch(batch, DEADLINE_S)
    decoded = codec.decode_tokenized_batch(body, DEADLINE_S)
    assert (decoded.key, decoded.ids, decoded.tokenize_s) == (batch.key, batch.ids, 0.25)
    restored, error = decoded.calls
    assert isinstance(restored, TokenizedCall)
    assert isinstance(error, Overloaded)
    assert restored._replace(token_offsets=()) == call._replace(token_offsets=())
    for actual, expected in zip(restored.token_offsets[0], offsets, strict=True):
        assert np.array_equal(actual, expected)
        assert getattr(actual, "dtype", None) == getattr(expected, "dtype", None)


def test_token_ids_that_do_not_match_the_lengths_are_rejected() -> None:
    batch = tokenized(TokenizedCall((2,), 0, None, 0.0), task=TaskName.SENTENCE_SIMILARITY)
    body = codec.encode_tokenized_batch(batch._replace(ids=b"1234"), 0.0)
    with pytest.raises(ChannelError, match="4 bytes of token ids for 2 tokens"):
        codec.decode_tokenized_batch(body, 0.0)


def test_outcomes_round_trip_arrays_values_and_errors() -> None:
    vectors = np.arange(6, dtype=np.float32).reshape(2, 3)
    timings = CallTimings(0.1, 0.2, 0.3, 4, 5)
    value = [{"label": "A", "score": 0.5, "nested": [1, None, True]}]
    outcomes = [
        CallResult(vectors, "cpu-int8", 1, timings),
        InvalidField("wrong", field="inputs[3]"),
        CallResult(value, "cpu-int8"),
        CallResult([vectors, vectors[:1]], "cpu-int8"),
    ]
    decoded = codec.decode_outcomes(codec.encode_outcomes(dict(enumerate(outcomes))))
    first, error, second, third = (decoded[index] for index in range(4))
    assert isinstance(first, CallResult)
    assert isinstance(second, CallResult)
    assert np.array_equal(first.value, vectors)
    assert first.value.dtype == np.float32
    assert first.timings == timings
    assert second.value == value
    assert isinstance(third, CallResult)
    assert third.value[1].shape == (1, 3)
    assert isinstance(error, InvalidField)
    assert (error.message, error.field) == ("wrong", "inputs[3]")


def test_a_decoded_array_does_not_hold_the_message() -> None:
    body = codec.encode_outcomes({0: CallResult(np.zeros((1, 4), np.float32), "fake")})
    outcome = codec.decode_outcomes(body)[0]
    assert isinstance(outcome, CallResult)
    assert outcome.value.base is None or outcome.value.base.nbytes == outcome.value.nbytes


def test_numpy_scalars_become_numbers() -> None:
    outcome = codec.decode_outcomes(
        codec.encode_outcomes({0: CallResult({"score": np.float32(0.5)}, "fake")})
    )[0]
    assert isinstance(outcome, CallResult)
    assert outcome.value == {"score": 0.5}


def error_kinds() -> list[type[ServeError]]:
    members = vars(errors).values()
    return [kind for kind in members if isinstance(kind, type) and issubclass(kind, ServeError)]


@pytest.mark.parametrize("kind", error_kinds())
def test_errors_keep_kind_and_fields(kind: type[ServeError]) -> None:
    error = kind("message", **({"estimated_time_s": 3.0} if kind is ModelLoading else {}))
    error.retry_after_s = 2.5
    decoded = codec.decode_error(codec.encode_error(error))
    assert type(decoded) is kind
    assert vars(decoded) == vars(error)
    assert str(decoded) == "message"


def test_error_with_the_name_of_a_file_that_is_no_utf8_is_encoded() -> None:
    error = errors.EngineFailed(os.fsdecode(b"cannot read caf\xe9.onnx"))
    assert codec.decode_error(codec.encode_error(error)).message == "cannot read caf?.onnx"


def test_an_error_of_an_unknown_kind_is_a_serve_error() -> None:
    body = msgspec.msgpack.encode(("NewerError", {"message": "m", "field": None}))
    decoded = codec.decode_error(body)
    assert type(decoded) is ServeError
    assert decoded.message == "m"


def test_generation_calls_and_answers_round_trip() -> None:
    options = GenerationOptions(
        sampling=SamplingParams(temperature=0.5, logit_bias=((1, -2.0),), seed=(1 << 64) - 1),
        beam_search=BeamSearchParams(4, early_stopping="never"),
        stop=("a", "b"),
        grammar=Grammar("json_schema", "{}"),
        truncation=Truncation.KEEP_END,
        languages=Languages(1, 2),
    )
    chat = Chat(({"role": "user", "content": "Hi", "parts": [10**30, 2.5]},), ({"name": "f"},))
    varied = chat._replace(tools=(), variables=(("enable_thinking", False), ("depth", {"n": 1})))
    for prompt in ("text", (1, 2, 3), chat, varied):
        call = GenerationCall(MODEL, prompt, options, DEADLINE_S - 1)
        body = codec.encode_generation_call(call, DEADLINE_S)
        assert codec.decode_generation_call(body, DEADLINE_S) == call
    others = (TopLogprob(6, "six", -1.0), TopLogprob(7, "\ufffd", -2.0, raw_bytes=b"\xe6"))
    token = Token(5, "", -0.5, False, others, b"\xe7")
    started = Started(3, 1, 7, "cpu-int8", (token,))
    finished = Finished(FinishReason.STOP, 2, GenerationTimings(0.1, 0.2, 0.3))
    for event in (started, Chunk("t", (token,)), Chunk("", (), finished)):
        assert codec.decode_event(codec.encode_event(event)) == event
    completion = Completion(started, "text", (token,), finished)
    assert codec.decode_completion(codec.encode_message(completion)) == completion


def test_inspection_messages_round_trip() -> None:
    request = TokenizeRequest(MODEL, ("a", "b"), True, "client", 1)
    assert codec.decode_tokenize_request(codec.encode_message(request)) == request
    decode = DecodeRequest(MODEL, ((1, 2), ()), False, "client", 1, trim_special=True)
    assert codec.decode_decode_request(codec.encode_message(decode)) == decode
    tokens = TextTokens(np.array([1], np.int32), np.array([[0, 1]], np.int32), {0: "[CLS]"})
    (decoded,) = codec.decode_text_tokens(codec.encode_message((tokens,)))
    assert np.array_equal(decoded.offsets, tokens.offsets)
    assert decoded.special == {0: "[CLS]"}


def test_pickles_and_truncated_messages_are_rejected() -> None:
    body = codec.encode_call_batch(
        CallBatch(key(), (Call(("a",), ("b",), OPTIONS[key().task], Truncation.REFUSE, 0.0),)), 0.0
    )
    for wrong in (pickle.dumps(DeadlineExceeded("no")), b"", *(body[:n] for n in range(len(body)))):
        with pytest.raises(ChannelError):
            codec.decode_call_batch(wrong, 0.0)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"\x09\x01\x00\x00\x00\x00", b"\x00\x01\xff\xff\xff\xff\x00", b"\x00\x09"],
)
def test_an_invalid_array_is_rejected(data: bytes) -> None:
    value = msgspec.msgpack.Ext(1, data)
    body = msgspec.msgpack.encode(({0: (value, "fake", 0, (0.0, 0.0, 0.0, 0, 0))}, {}))
    with pytest.raises(ChannelError):
        codec.decode_outcomes(body)


def test_options_of_another_task_are_rejected() -> None:
    body = msgspec.msgpack.encode((key(), ((("a",), ("b",), ["x"], "refuse", 0.0, None),)))
    with pytest.raises(ChannelError, match="options of the task `feature-extraction`"):
        codec.decode_call_batch(body, 0.0)
