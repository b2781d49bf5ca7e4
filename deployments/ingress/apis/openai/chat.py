"""Responses of `/v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence

from deployments.ingress.apis.openai.responses import (
    FINISH_REASONS,
    AlignedTokens,
    build_identity,
    build_response_usage,
    clamp_logprob,
)
from deployments.ingress.apis.openai.schemas import (
    ChatBody,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    ChatTopLogprob,
    FinishReasonWord,
    ResponseToolCall,
)
from deployments.ingress.apis.openai.streaming import encode_stream
from deployments.ingress.apis.openai.tool_calls import FunctionCall, ToolCallParser
from deployments.ingress.apis.openai.tool_choice import forced_tools, offered_tools
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.requests import GenerationResponse
from deployments.messages import (
    Chunk,
    Completion,
    Finished,
    FinishReason,
    Token,
    TopLogprob,
    join_reasoning,
)

OBJECT, CHUNK_OBJECT, ID_PREFIX = "chat.completion", "chat.completion.chunk", "chatcmpl"


def build_chat_response(response: GenerationResponse, body: ChatBody) -> ChatCompletion:
    parser = build_tool_call_parser(body)
    return ChatCompletion(
        **build_identity(response.model, OBJECT, ID_PREFIX),
        choices=[
            build_choice(index, completion, parser, with_logprobs=bool(body.logprobs))
            for index, completion in enumerate(response.completions)
        ],
        usage=build_response_usage(response, body.n or 1),
    )


def encode_chat_stream(stream: GenerationStream, body: ChatBody) -> AsyncGenerator[bytes, None]:
    parser = build_tool_call_parser(body)
    choices = [
        ChatStreamChoice(index, parser, with_logprobs=bool(body.logprobs))
        for index in range(len(stream.started))
    ]
    return encode_stream(
        stream,
        build_identity(stream.model, CHUNK_OBJECT, ID_PREFIX),
        choices,
        choices_per_prompt=len(choices),
        includes_usage=body.includes_usage,
    )


def build_tool_call_parser(body: ChatBody) -> ToolCallParser | None:
    """Build a parser for the offered tools; None if the request offers no tools."""
    tools = offered_tools(body)
    if not tools:
        return None
    return ToolCallParser(
        frozenset(tool.function.name for tool in tools),
        is_parallel=body.parallel_tool_calls is not False,
        is_forced=bool(forced_tools(body)),
        schemas={tool.function.name: tool.function.parameters or {} for tool in tools},
    )


def build_choice(
    index: int, completion: Completion, parser: ToolCallParser | None, *, with_logprobs: bool
) -> ChatChoice:
    """Build a choice. The content is the text without the tool calls at its start or end.

    A forced call has no content, even if the text ended before the name of the function did.
    """
    text: str | None = completion.text
    calls: Sequence[FunctionCall] = ()
    if parser is not None:
        start, end, calls = parser.parse_tool_calls(
            completion.text, is_cut=is_cut_short(completion.finished)
        )
        if calls or parser.is_forced:
            content = completion.text[start:end].rstrip()
            text = (content.lstrip() if start else content) or None
    message = ChatMessage(role="assistant", content=text)
    if reasoning := join_reasoning(completion).strip():
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [build_tool_call(call) for call in calls]
    return ChatChoice(
        index=index,
        message=message,
        logprobs=build_logprobs(AlignedTokens().take(completion)) if with_logprobs else None,
        finish_reason=map_finish_reason(completion.finished.reason, calls),
    )


def is_cut_short(finished: Finished) -> bool:
    return finished.reason is not FinishReason.END


def map_finish_reason(reason: FinishReason, calls: Sequence[FunctionCall]) -> FinishReasonWord:
    has_ended = bool(calls) and all(call.is_complete for call in calls)
    return "tool_calls" if has_ended else FINISH_REASONS[reason]


def build_tool_call(call: FunctionCall) -> ResponseToolCall:
    """Build a tool call with a new id. The client's message with the result refers to this id.

    The id has nine characters, because chat templates of Mistral require nine letters or digits.
    """
    return ResponseToolCall(
        id=uuid.uuid4().hex[:9],
        type="function",
        function={"name": call.name, "arguments": call.arguments},
    )


def build_logprobs(tokens: Sequence[Token]) -> ChatLogprobs:
    """Build the logprobs. Special tokens are omitted, because they are not part of the text."""
    content = [
        ChatTokenLogprob(
            **build_token_logprob(token),
            top_logprobs=[build_token_logprob(alternative) for alternative in token.alternatives],
        )
        for token in tokens
        if not token.special
    ]
    return ChatLogprobs(content=content, refusal=None)


def build_token_logprob(token: Token | TopLogprob) -> ChatTopLogprob:
    text = token.text.encode("utf-8", "replace")
    return ChatTopLogprob(
        token=token.text,
        logprob=clamp_logprob(token.logprob),
        bytes=list(text if token.raw_bytes is None else token.raw_bytes),
    )


class ChatStreamChoice:
    """One choice of a stream. Text that may belong to a tool call is held back."""

    def __init__(self, index: int, parser: ToolCallParser | None, *, with_logprobs: bool) -> None:
        self._index = index
        self._parser = parser
        self._with_logprobs = with_logprobs
        self._text = ""  # text not sent yet
        self._has_content = False
        self._has_reasoning = False
        self._reasoning_blanks = ""  # white space that may end the reasoning, not sent yet
        self._aligned = AlignedTokens()
        self._tokens: deque[Token] = deque()  # tokens not sent yet
        # Start of the first of them in the unsent text; negative if it began before.
        self._token_start = 0

    def open(self) -> Iterator[ChatChunkChoice]:
        # As in OpenAI's streams, a message that is only a call has no content.
        is_forced = self._parser is not None and self._parser.is_forced
        yield self._build({"role": "assistant", "content": None if is_forced else ""})

    def add_chunk(self, chunk: Chunk) -> Iterator[ChatChunkChoice]:
        yield from self._send_reasoning(join_reasoning(chunk))
        self._text += chunk.text
        if self._with_logprobs:
            self._tokens += [t for t in self._aligned.take(chunk) if not t.special]
        yield from self._flush(self._count_content())
        if chunk.finished is None:
            return
        start, end = 0, len(self._text)
        calls: Sequence[FunctionCall] = ()
        if self._parser is not None:
            start, end, calls = self._parser.parse_tool_calls(
                self._text,
                is_cut=is_cut_short(chunk.finished),
                follows_content=self._has_content,
            )
        if start == 0:
            yield from self._flush(end, is_last=not calls)
        elif content := self._text[start:end].strip():
            # All tokens go with the calls, because the calls came first.
            yield self._build({"content": content})
        if calls:
            tool_calls = [
                ResponseToolCall(index=i, **build_tool_call(call)) for i, call in enumerate(calls)
            ]
            choice = self._build({"tool_calls": tool_calls})
            if self._with_logprobs:
                choice["logprobs"] = build_logprobs(self._tokens)
            yield choice
        yield self._build({}, map_finish_reason(chunk.finished.reason, calls))

    def _send_reasoning(self, added: str) -> Iterator[ChatChunkChoice]:
        """Yield the reasoning without the white space at its ends."""
        text = self._reasoning_blanks + added
        sent = text.rstrip()
        self._reasoning_blanks = text[len(sent) :]
        if sent:
            yield self._build({"reasoning_content": sent if self._has_reasoning else sent.lstrip()})
            self._has_reasoning = True

    def _count_content(self) -> int:
        """Return how many characters of the unsent text are content, whatever follows."""
        if self._parser is None:
            return len(self._text)
        if self._has_content:
            return self._parser.find_marked_call(self._text)
        return self._parser.count_content(self._text)

    def _flush(self, count: int, *, is_last: bool = False) -> Iterator[ChatChunkChoice]:
        """Yield the first `count` unsent characters, with the logprobs of their tokens.

        While a parser holds text back, keep the white space before that text, which is left out
        before a call. `is_last` is true at the end of a text without calls: nothing is held back.
        """
        is_free = is_last or self._parser is None
        if not is_free:
            count = len(self._text[:count].rstrip())
        if count or (self._tokens and is_free):
            choice = self._build({"content": self._text[:count]})
            if self._with_logprobs:
                choice["logprobs"] = build_logprobs(self._take_tokens(count, takes_all=is_free))
            self._text = self._text[count:]
            self._has_content = True
            yield choice

    def _take_tokens(self, count: int, *, takes_all: bool) -> list[Token]:
        """Remove the unsent tokens that begin within the first `count` unsent characters."""
        taken = []
        while self._tokens and (takes_all or self._token_start < count):
            token = self._tokens.popleft()
            self._token_start += len(token.text)
            taken.append(token)
        self._token_start -= count
        return taken

    def _build(
        self, delta: ChatDelta, finish_reason: FinishReasonWord | None = None
    ) -> ChatChunkChoice:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
