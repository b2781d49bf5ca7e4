"""Request bodies and response objects of OpenAI's generation API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

# pydantic rejects typing.TypedDict before Python 3.12.
from typing_extensions import TypedDict

from deployments.ingress.apis.shared.generation_answers import StreamableBody
from deployments.ingress.apis.shared.openai_error import ErrorObject
from deployments.ingress.apis.shared.typed_objects import reject_other_types, union_by_type
from deployments.ingress.http.api import LENIENT, build_schema
from deployments.tasks.inputs import FailFastList, Many, NonEmptyText, list_or, text_or

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Alternatives = Annotated[int, Field(ge=0, le=20)]
# -1, which some clients send, means no limit of the request.
TokenLimit = Annotated[
    Annotated[int, Field(ge=1)] | None,
    BeforeValidator(lambda value: None if value == -1 else value),
]
# Clients in all languages send seeds as signed 64-bit integers.
SeedNumber = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# Agents with many MCP servers send more than the 128 of OpenAI. Grammars have a limit of their own.
MAX_TOOLS = 1_024
TOOL_ADVICE = "this server runs no tools: offer a tool of the type `function`"
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class StreamOptions(BaseModel):
    model_config = LENIENT

    include_usage: bool | None = None


class GenerationBody(StreamableBody):
    """Fields of all generation requests. Unknown keys are ignored, as in OpenAI's API."""

    stop: Annotated[Any, WithJsonSchema(build_schema(str | list[str] | None))] = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None  # as `min_tokens` with the value of `max_tokens`
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0 and -1: no limit
    min_p: Probability | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[Any, WithJsonSchema(build_schema(dict[str, float] | None))] = None
    seed: SeedNumber | None = None
    # Grammars in the fields of other servers (answer_grammar.py).
    json_schema: Annotated[Any, WithJsonSchema(build_schema(str | dict[str, Any] | None))] = None
    regex: Annotated[Any, WithJsonSchema(build_schema(str | None))] = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    structured_outputs: Any = None
    # Fields of other servers that change the text; rejected, unless they have no effect.
    grammar: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    guided_grammar: Any = None
    chat_template: Any = None
    prompt_logprobs: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    documents: Any = None
    n_predict: Any = None
    repeat_penalty: Any = None
    mirostat: Any = None
    stop_regex: Any = None
    no_stop_trim: Any = None
    return_tokens_as_token_ids: Any = None
    return_token_ids: Any = None
    logprob_token_ids: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    stop_token_ids: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None


class ChoicesBody(GenerationBody):
    """Fields of the requests that return a list of choices, which are chats and completions."""

    n: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[Any, WithJsonSchema(build_schema(dict[str, Any] | None))] = None

    @property
    def includes_usage(self) -> bool:
        """Whether the last chunk of a stream contains the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(ChoicesBody):
    """Body of `/v1/completions`."""

    # requests.py validates this field, and names the invalid element in errors.
    prompt: Annotated[
        Any, WithJsonSchema(build_schema(str | list[str] | list[int] | list[list[int]] | None))
    ] = None
    suffix: str | None = None  # rejected, unless it is empty
    add_special_tokens: Any = None  # rejected, unless it is true
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Alternatives | None = None


class TextPart(BaseModel):
    """A part of a message. Only texts and refusals are supported."""

    model_config = LENIENT

    type: Annotated[
        Literal["text"],
        reject_other_types("text", advice="models read only texts: send parts of the type `text`"),
    ]
    text: str


class RefusalPart(BaseModel):
    """A part of a message of the assistant in which it declines to answer."""

    model_config = LENIENT

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class CalledFunction(BaseModel):
    model_config = LENIENT

    name: NonEmptyText
    # A JSON object, or its text. null and a blank text mean no arguments.
    arguments: text_or(dict[str, Any], str) | None = None  # type: ignore[valid-type]


class ToolCall(BaseModel):
    """A tool call in a message of the assistant."""

    model_config = LENIENT

    id: str | None = None
    type: Annotated[
        Literal["function"],
        reject_other_types("function", advice="send calls of the type `function`"),
    ] = "function"
    function: CalledFunction


ContentPart = union_by_type(TextPart, refusal=RefusalPart)
# An empty list is valid: some clients send [] when a tool returned nothing.
Content = list_or(str, Annotated[list[ContentPart], FailFastList()])  # type: ignore[valid-type]


class ChatRequestMessage(BaseModel):
    model_config = LENIENT

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None  # type: ignore[valid-type]  # built by a function
    refusal: str | None = None  # of the assistant, in place of `content`
    # Of the assistant, before `content`; None of other roles. The second name is that of vLLM.
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FailFastList()] | None = None
    tool_call_id: str | None = None
    function_call: Any = None  # former form of `tool_calls`; rejected
    prefix: Any = None  # true: the answer continues this message; rejected

    @field_validator("reasoning_content", "reasoning", mode="before")
    @classmethod
    def _ignore_other_roles(cls, value: Any, info: ValidationInfo) -> Any:
        return value if info.data.get("role") == "assistant" else None


class FunctionDefinition(BaseModel):
    """A function that the model may call. `parameters` is a JSON schema."""

    # The chat template receives unknown keys too.
    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    type: Annotated[Literal["function"], reject_other_types("function", advice=TOOL_ADVICE)]
    function: FunctionDefinition


class ThinkingMode(BaseModel):
    """Whether the model thinks, as in the APIs of GLM and DeepSeek."""

    model_config = LENIENT

    type: Literal["enabled", "disabled"]


class ChatBody(ChoicesBody):
    """Body of `/v1/chat/completions`."""

    messages: Many[ChatRequestMessage]
    max_tokens: TokenLimit = None
    max_completion_tokens: TokenLimit = None  # newer name of `max_tokens`; takes precedence
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FailFastList()] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Annotated[Any, WithJsonSchema(build_schema(str | dict[str, Any] | None))] = None
    functions: Any = None  # former form of `tools`; rejected
    function_call: Any = None  # former form of `tool_choice`; rejected
    # Fields of completions; rejected, unless they have no effect.
    echo: Any = None
    best_of: Any = None
    # Variables of the chat template, such as `enable_thinking`, as in vLLM.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # template variable of the same name
    enable_thinking: bool | None = None  # template variable of the same name, as in Qwen's API
    thinking: ThinkingMode | None = None
    # Other forms of the reasoning, of vLLM, SGLang and llama.cpp; rejected, unless they have the
    # value of our form.
    include_reasoning: Any = None
    separate_reasoning: Any = None
    reasoning_format: Any = None


FinishReasonWord = Literal["stop", "length", "tool_calls"]


class OpenAIError(TypedDict):
    """Body of an error response, and last event of a failed stream."""

    error: ErrorObject


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    reasoning_tokens: int


class GenerationUsage(TypedDict):
    """Token counts, special tokens included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: NotRequired[CompletionDetails]  # only with reasoning


class StreamTimings(TypedDict):
    """Milliseconds of each phase, in the chunk with the usage. OpenAI has no such field."""

    tokenize_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float


class ResponseIdentity(TypedDict):
    """Fields that responses and the chunks of streams share."""

    id: str
    object: str
    created: int  # seconds since the epoch
    model: str
    system_fingerprint: str  # version of the model


class CompletionLogprobs(TypedDict):
    """Log-probabilities of tokens. Each list has one element per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters before each token


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonWord | None  # null until the last chunk of a stream


class CompletionResponse(ResponseIdentity):
    """Response of `/v1/completions`."""

    choices: list[CompletionChoice]
    usage: NotRequired[GenerationUsage | None]


class CompletionChunk(CompletionResponse):
    """A chunk of a stream of `/v1/completions`. The chunk with the usage has no choices."""

    timings: NotRequired[StreamTimings]


class ChatTopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]
    refusal: None


class ResponseFunction(TypedDict):
    """A called function. `arguments` is JSON text."""

    name: str
    arguments: str


class ResponseToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: ResponseFunction
    index: NotRequired[int]  # only in streams


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]  # of a thinking model, before `content`
    tool_calls: NotRequired[list[ResponseToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonWord


class ChatCompletion(ResponseIdentity):
    """Response of `/v1/chat/completions`."""

    choices: list[ChatChoice]
    usage: GenerationUsage


class ChatDelta(TypedDict):
    """Change of a message. The last chunk of a choice has an empty delta."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]  # null only at the start of a forced call
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ResponseToolCall]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonWord | None  # null until the last chunk


class ChatCompletionChunk(ResponseIdentity):
    """A chunk of a stream of `/v1/chat/completions`. The chunk with the usage has no choices."""

    choices: list[ChatChunkChoice]
    usage: NotRequired[GenerationUsage | None]
    timings: NotRequired[StreamTimings]
