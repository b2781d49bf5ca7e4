"""Bodies of the requests that generate text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from deployments.ingress.http.api import LENIENT, schema_of
from deployments.ingress.http.request_options import RequestOptions
from deployments.tasks.inputs import FailFastList, Many, NonEmptyText

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Alternatives = Annotated[int, Field(ge=0, le=20)]
# The most that a signed number of 64 bits holds, which is how clients of all languages send it.
SeedNumber = Annotated[int, Field(ge=-(2**63), lt=2**63)]

# Branches of a union; see tasks/inputs.py for their brackets.
_TEXT, _PARTS = "<text>", "<parts>"


class StreamOptions(BaseModel):
    """What a stream tells besides its text."""

    model_config = LENIENT

    include_usage: bool | None = None


class GenerationBody(BaseModel):
    """What both requests have. Keys they do not name are not for us, as with OpenAI."""

    model_config = LENIENT

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[Any, WithJsonSchema(schema_of(str | list[str] | None))] = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0 and -1: no limit
    min_p: Probability | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[Any, WithJsonSchema(schema_of(dict[str, float] | None))] = None
    seed: SeedNumber | None = None
    response_format: Annotated[Any, WithJsonSchema(schema_of(dict[str, Any] | None))] = None
    options: Annotated[Any, WithJsonSchema(schema_of(RequestOptions))] = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with what it took."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    # Told apart, and validated with the place of what is wrong, where the question is made.
    prompt: Annotated[
        Any, WithJsonSchema(schema_of(str | list[str] | list[int] | list[list[int]] | None))
    ] = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Alternatives | None = None


class TextPart(BaseModel):
    """A part of a message; only text is read."""

    model_config = LENIENT

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """What a message of the assistant called."""

    model_config = LENIENT

    name: NonEmptyText
    arguments: str | dict[str, Any] = ""


class ToolCall(BaseModel):
    """A call in a message of the assistant."""

    model_config = LENIENT

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


Content = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[Many[TextPart], Tag(_PARTS)],
    Discriminator(lambda value: _PARTS if isinstance(value, list) else _TEXT),
]


class ChatRequestMessage(BaseModel):
    """One message of a conversation."""

    model_config = LENIENT

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FailFastList()] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(BaseModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    # The model's template gets it as it was sent.
    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool, as OpenAI declares it."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    type: Literal["function"]
    function: FunctionDefinition


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    messages: Many[ChatRequestMessage]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None  # its newer name
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Field(max_length=128), FailFastList()] | None = None
    tool_choice: Annotated[Any, WithJsonSchema(schema_of(str | dict[str, Any] | None))] = None
