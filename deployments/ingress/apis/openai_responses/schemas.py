"""Bodies of the Responses API, responses with their items, and the events of streams."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
)

# pydantic rejects typing.TypedDict before Python 3.12.
from typing_extensions import TypedDict

from deployments.ingress.apis.openai.schemas import (
    MAX_TOOLS,
    TOOL_ADVICE,
    Alternatives,
    ChatTokenLogprob,
    CompletionDetails,
    FunctionName,
    GenerationBody,
    RefusalPart,
)
from deployments.ingress.apis.shared.typed_objects import reject_other_types, union_by_type
from deployments.ingress.http.api import LENIENT, build_schema
from deployments.tasks.inputs import FailFastList, Many, NonEmptyText, list_or

ITEM_ADVICE = "send items of the types `message`, `function_call`, `function_call_output`"
PART_ADVICE = "models read only texts: send `input_text`"
REFERENCE_ADVICE = "this server stores no items: send the item itself"
NOT_STORED = "because this server stores no responses"


class InputTextPart(BaseModel):
    model_config = LENIENT

    type: Annotated[
        Literal["input_text", "output_text"],
        reject_other_types("input_text", "output_text", advice=PART_ADVICE),
    ]
    text: str


InputPart = union_by_type(InputTextPart, refusal=RefusalPart)
# An empty list is valid: agents send [] when a tool returned nothing. Other messages with an empty
# list are refused when the body becomes a chat.
TextOrParts = list_or(str, Annotated[list[InputPart], FailFastList()])  # type: ignore[valid-type]


class MessageItem(BaseModel):
    """A message. Of the assistant it may be an item of an earlier response."""

    model_config = LENIENT

    type: Annotated[
        Literal["message"],
        reject_other_types(
            "message", advice=ITEM_ADVICE, advice_by_type={"item_reference": REFERENCE_ADVICE}
        ),
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts  # type: ignore[valid-type]


class FunctionCallItem(BaseModel):
    """A call of an earlier response. `arguments` is the text of a JSON object."""

    model_config = LENIENT

    type: Literal["function_call"]
    call_id: str
    name: NonEmptyText
    arguments: str


class FunctionOutputItem(BaseModel):
    """What a called function returned."""

    model_config = LENIENT

    type: Literal["function_call_output"]
    call_id: str
    output: TextOrParts  # type: ignore[valid-type]


class ReasoningPart(BaseModel):
    model_config = LENIENT

    text: str


class ReasoningInputItem(BaseModel):
    """The reasoning of an earlier response. `encrypted_content` cannot be read, and is ignored."""

    model_config = LENIENT

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], FailFastList()] | None = None
    content: Annotated[list[ReasoningPart], FailFastList()] | None = None


InputItem = union_by_type(
    MessageItem,
    function_call=FunctionCallItem,
    function_call_output=FunctionOutputItem,
    reasoning=ReasoningInputItem,
)


class FunctionTool(BaseModel):
    """A function that the model may call: what a chat has under `function`, beside `type`."""

    # The chat template receives unknown keys too.
    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    type: Annotated[Literal["function"], reject_other_types("function", advice=TOOL_ADVICE)]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextSettings(BaseModel):
    """`format` is `text`, `json_object`, or `json_schema` with `name` and `schema` beside it."""

    model_config = LENIENT

    format: dict[str, Any] | None = None


class ReasoningSettings(BaseModel):
    model_config = LENIENT

    effort: str | None = None  # variable `reasoning_effort` of the chat template


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]  # OpenAI's bounds


class ResponsesBody(GenerationBody):
    """Body of `/v1/responses`."""

    input: list_or(str, Many[InputItem]) | None = None  # type: ignore[valid-type]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), FailFastList()] | None = None
    tool_choice: Annotated[Any, WithJsonSchema(build_schema(str | dict[str, Any] | None))] = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # as in chats
    include: list[str] | None = None  # only `message.output_text.logprobs` has an effect
    top_logprobs: Alternatives | None = None
    metadata: Metadata | None = None  # returned unchanged
    user: str | None = None  # returned unchanged
    # Fields that need stored responses or prompts; rejected, unless they ask for nothing.
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    truncation: Any = None
    # Fields of chats with another name here; rejected.
    messages: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    response_format: Any = None
    reasoning_effort: Any = None
    functions: Any = None
    function_call: Any = None
    logprobs: Any = None
    include_reasoning: Any = None
    separate_reasoning: Any = None
    reasoning_format: Any = None


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]  # always empty
    logprobs: list[ChatTokenLogprob]  # empty, unless `include` asks for them


class ReasoningTextPart(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputTextPart]


class ReasoningOutput(TypedDict):
    """The reasoning of a thinking model, which is not summarized."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Any]  # always empty
    content: list[ReasoningTextPart]


class FunctionCallOutput(TypedDict):
    """A call by the model. An input item with the result refers to `call_id`."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str  # JSON


OutputItem = ReasoningOutput | OutputMessage | FunctionCallOutput


class InputTokenCounts(TypedDict):
    cached_tokens: int
    cache_write_tokens: int  # always 0: the prefix cache costs nothing


class ResponseTokens(TypedDict):
    """Token counts, special tokens included."""

    input_tokens: int
    input_tokens_details: InputTokenCounts
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


FailureCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class ResponseFailure(TypedDict):
    code: FailureCode
    message: str


class IncompleteReason(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseObject(TypedDict):
    """A response. Fields of the request are repeated as they apply."""

    id: str
    object: Literal["response"]
    created_at: int  # seconds since the epoch
    completed_at: NotRequired[int]  # only if `completed`
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItem]
    usage: ResponseTokens | None  # null until the end
    error: ResponseFailure | None
    incomplete_details: IncompleteReason | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, str]
    user: str | None
    previous_response_id: None
    store: Literal[False]
    background: Literal[False]
    truncation: Literal["disabled"]


class NumberedEvent(TypedDict):
    sequence_number: NotRequired[int]  # from 0; set when the event is sent


class ResponseStateEvent(NumberedEvent):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class OutputItemEvent(NumberedEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ItemEvent(NumberedEvent):
    item_id: str
    output_index: int


class PartEvent(ItemEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputTextPart | ReasoningTextPart


class TextEvent(ItemEvent):
    """A change of a text, or all of it. Only those of `output_text` have `logprobs`."""

    type: Literal[
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
    ]
    content_index: int
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[ChatTokenLogprob]]


class ArgumentsEvent(ItemEvent):
    type: Literal["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    delta: NotRequired[str]
    arguments: NotRequired[str]
    name: NotRequired[str]


class FailureEvent(NumberedEvent):
    """The last event but one of a failed stream."""

    type: Literal["error"]
    code: str
    message: str
    param: str | None


ResponsesEvent = (
    ResponseStateEvent | OutputItemEvent | PartEvent | TextEvent | ArgumentsEvent | FailureEvent
)


class InputTokenCount(TypedDict):
    """Response of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int
