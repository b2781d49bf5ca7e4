"""What the requests that generate text are answered with, and what the answers share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NotRequired

import orjson
from typing_extensions import TypedDict

from deployments.errors import ServeError
from deployments.generation.messages import Completion, Finished, FinishReason, Started
from deployments.ingress.http.errors import rename_field
from deployments.ingress.http.sse import event_of
from deployments.registry import RegisteredModel


class ErrorObject(TypedDict):
    """An error; `param` is the field that is at fault."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(TypedDict):
    """The last event of a stream that failed, and what a request that failed is answered."""

    error: ErrorObject


def build_openai_error(error: ServeError) -> ErrorObject:
    """What an error says, under OpenAI's names."""
    kind = "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status >= 500:
        kind = "server_error"
    return {"message": error.message, "type": kind, "param": error.field, "code": error.code}


def error_encoder(names: Mapping[str, str]) -> Callable[[ServeError], bytes]:
    """What turns an error in the middle of a stream into an event, its fields called by `names`."""

    def told(error: ServeError) -> bytes:
        return event_of(orjson.dumps({"error": build_openai_error(rename_field(error, names))}))

    return told


FinishReasonWord = Literal["stop", "length", "tool_calls"]
FINISH_REASONS: Mapping[FinishReason, FinishReasonWord] = {
    FinishReason.LENGTH: "length",
    FinishReason.END: "stop",
    FinishReason.STOP: "stop",
}
# JSON has no infinity; a token of probability nought is told as OpenAI tells it.
MIN_LOGPROB = -9999.0
DONE = event_of(b"[DONE]")


class PromptDetails(TypedDict):
    """Which of the prompt's tokens were cheap."""

    cached_tokens: int


class GenerationUsage(TypedDict):
    """Tokens read and generated, special tokens included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ResponseEnvelope(TypedDict):
    """What an answer, and every part of a stream, says of itself."""

    id: str
    object: str
    created: int  # seconds since the epoch
    model: str
    system_fingerprint: str  # the model's version


class CompletionLogprobs(TypedDict):
    """The T tokens of a text, in columns."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # where in the text each token begins


class CompletionChoice(TypedDict):
    """One text, or the next part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonWord | None  # null until the last part of a stream


class CompletionResponse(ResponseEnvelope):
    """The answer of `/v1/completions`, and each part of its streams."""

    choices: list[CompletionChoice]
    usage: NotRequired[GenerationUsage | None]


class ChatTopLogprob(TypedDict):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatTopLogprob):
    """A token of the answer."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(TypedDict):
    """The tokens of an answer, or of a part of it."""

    content: list[ChatTokenLogprob]
    refusal: None


class ResponseFunction(TypedDict):
    """What is called; `arguments` is JSON as text."""

    name: str
    arguments: str


class ResponseToolCall(TypedDict):
    """A call that the model wants made."""

    id: str
    type: Literal["function"]
    function: ResponseFunction
    index: NotRequired[int]  # in streams


class ChatMessage(TypedDict):
    """What the model answers."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: NotRequired[list[ResponseToolCall]]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonWord


class ChatCompletion(ResponseEnvelope):
    """The answer of `/v1/chat/completions`."""

    choices: list[ChatChoice]
    usage: GenerationUsage


class ChatDelta(TypedDict):
    """What a part of a stream adds to a message; nothing in the last part of an answer."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ResponseToolCall]]


class ChatChunkChoice(TypedDict):
    """The next part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonWord | None  # null until the last part


class ChatCompletionChunk(ResponseEnvelope):
    """Each part of a stream of `/v1/chat/completions`; the one that tells usage has no choices."""

    choices: list[ChatChunkChoice]
    usage: NotRequired[GenerationUsage | None]


def build_envelope(model: RegisteredModel, kind: str, prefix: str) -> ResponseEnvelope:
    """The head of a fresh answer."""
    return ResponseEnvelope(
        id=f"{prefix}-{uuid.uuid4().hex}",
        object=kind,
        created=int(time.time()),
        model=model.ref.id,
        system_fingerprint=model.ref.version,
    )


def build_usage(
    started: Sequence[Started], finished: Sequence[Finished], per_prompt: int
) -> GenerationUsage:
    """What answers took: each prompt once, of which `started` has `per_prompt`, and all text."""
    firsts = started[::per_prompt]
    read = sum(one.prompt_tokens for one in firsts)
    written = sum(one.generated_tokens for one in finished)
    return GenerationUsage(
        prompt_tokens=read,
        completion_tokens=written,
        total_tokens=read + written,
        prompt_tokens_details={"cached_tokens": sum(one.cached_tokens for one in firsts)},
    )


def build_completions_usage(
    told: Sequence[Completion], discarded: Sequence[Completion], per_prompt: int
) -> GenerationUsage:
    """`build_usage` whole answers, those included that nobody is told."""
    finished = [one.finished for one in (*told, *discarded)]
    return build_usage([one.started for one in told], finished, per_prompt)


def encode_chunk(
    head: ResponseEnvelope, choice: Mapping[str, Any], *, includes_usage: bool
) -> bytes:
    """One part of a stream; `usage` is null in it where the last part tells it."""
    usage = {"usage": None} if includes_usage else {}
    return event_of(orjson.dumps({**head, "choices": [choice], **usage}))


def encode_usage(head: ResponseEnvelope, usage: GenerationUsage) -> bytes:
    """The part of a stream that tells what it took."""
    return event_of(orjson.dumps({**head, "choices": [], "usage": usage}))


def clamp_logprob(logprob: float | None) -> float:
    """A log-probability that JSON can carry."""
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)
