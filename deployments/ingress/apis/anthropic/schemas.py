"""Request bodies, response objects and events of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, Field

# pydantic rejects typing.TypedDict before Python 3.12.
from typing_extensions import TypedDict

from deployments.ingress.apis.openai.schemas import Probability
from deployments.ingress.apis.shared.generation_answers import StreamableBody
from deployments.ingress.apis.shared.typed_objects import reject_other_types, union_by_type
from deployments.ingress.http.api import LENIENT
from deployments.tasks.inputs import FailFastList, Many, NonEmptyText, list_or


class TextBlock(BaseModel):
    """A text. Other keys, such as `cache_control` and `citations`, are ignored."""

    model_config = LENIENT

    type: Annotated[
        Literal["text"], reject_other_types("text", advice="send blocks of the type `text`")
    ]
    text: str


class ThinkingBlock(BaseModel):
    """Reasoning of the assistant. Any `signature` is valid."""

    model_config = LENIENT

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(BaseModel):
    """Reasoning that only Anthropic can read; ignored."""

    model_config = LENIENT

    type: Literal["redacted_thinking"]


class ToolUseBlock(BaseModel):
    """A tool call of the assistant."""

    model_config = LENIENT

    type: Literal["tool_use"]
    id: str
    name: NonEmptyText
    input: dict[str, Any]


TextBlocks = Annotated[list[TextBlock], FailFastList()]


class ToolResultBlock(BaseModel):
    """The result of a tool call, in a message of the user."""

    model_config = LENIENT

    type: Literal["tool_result"]
    tool_use_id: str
    content: list_or(str, TextBlocks) | None = None  # type: ignore[valid-type]
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
_AnyBlock = union_by_type(
    TextBlock,
    thinking=ThinkingBlock,
    redacted_thinking=RedactedThinkingBlock,
    tool_use=ToolUseBlock,
    tool_result=ToolResultBlock,
)


class InputMessage(BaseModel):
    model_config = LENIENT

    role: Literal["user", "assistant", "system"]
    content: list_or(str, Annotated[list[_AnyBlock], FailFastList()])  # type: ignore[valid-type]

    @property
    def blocks(self) -> list[Block]:
        content = self.content or ""  # an answer without text has an empty list
        return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


class CustomTool(BaseModel):
    """A tool of the client. `input_schema` is a JSON schema of an object."""

    model_config = LENIENT

    type: (
        Annotated[
            Literal["custom"],
            reject_other_types("custom", advice="send tools with `input_schema`"),
        ]
        | None
    ) = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(BaseModel):
    model_config = LENIENT

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    """Whether a thinking model thinks. `budget_tokens` and `display` have no effect.

    The type `between_tools` is rejected, because chat templates know no such mode.
    """

    model_config = LENIENT

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(BaseModel):
    model_config = LENIENT

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = LENIENT

    effort: str | None = None  # the template variable `reasoning_effort`
    format: OutputFormat | None = None


class PromptBody(StreamableBody):
    """Body of `/v1/messages/count_tokens`: what makes the prompt."""

    messages: Many[InputMessage]
    system: list_or(str, TextBlocks) | None = None  # type: ignore[valid-type]
    tools: Annotated[list[CustomTool], FailFastList()] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    thread: Any = None  # a conversation that the server would keep
    mcp_servers: list[Any] | None = None
    container: Any = None
    output_format: Any = None


class MessagesBody(PromptBody):
    """Body of `/v1/messages`. Unknown keys, such as `metadata`, are ignored."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[NonEmptyText], FailFastList()] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Probability | None = None


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputTokensDetails(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    """Token counts. `input_tokens` lacks the tokens from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[OutputTokensDetails]  # only with reasoning


class TextContent(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingContent(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str  # empty


class ToolUseContent(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any  # an object


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class MessageEnd(TypedDict):
    stop_reason: StopReason | None  # null until the end of a stream
    stop_sequence: str | None


class AnthropicMessage(MessageEnd):
    """Response of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    usage: MessageUsage


class TokenCount(TypedDict):
    """Response of `/v1/messages/count_tokens`."""

    input_tokens: int


class AnthropicModel(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str  # RFC 3339; the epoch for a model that cannot be used
    lifecycle: Literal["active"]


class AnthropicModelPage(TypedDict):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ErrorDetails(TypedDict):
    error_code: str


class AnthropicErrorObject(TypedDict):
    type: str
    message: str
    details: ErrorDetails


class AnthropicError(TypedDict):
    """Body of an error response, and last event of a failed stream."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: NotRequired[str]


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: AnthropicMessage


class ContentBlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


Delta = TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: Delta


class ContentBlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(TypedDict):
    type: Literal["message_stop"]


# An event of a stream; its name is its `type`.
Event = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | AnthropicError
)
