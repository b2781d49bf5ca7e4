"""Answers of `/v1/chat/completions`, whole and in parts."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

from deployments.generation.messages import Chunk, Completion, FinishReason, Token, TopLogprob
from deployments.ingress.apis.openai.responses import (
    DONE,
    FINISH_REASONS,
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
    build_completions_usage,
    build_envelope,
    build_usage,
    clamp_logprob,
    encode_chunk,
    encode_usage,
)
from deployments.ingress.apis.openai.schemas import ChatBody
from deployments.ingress.apis.openai.tools import FunctionCall, ToolCallParser, offered_tools
from deployments.ingress.generation import GenerationResponse, GenerationStream

OBJECT, CHUNK_OBJECT, PREFIX = "chat.completion", "chat.completion.chunk", "chatcmpl"


def build_tool_call_parser(body: ChatBody) -> ToolCallParser | None:
    """The reader of calls; None where there is nothing to call."""
    tools = offered_tools(body)
    return ToolCallParser(frozenset(tool.function.name for tool in tools)) if tools else None


def build_chat_response(reply: GenerationResponse, body: ChatBody) -> ChatCompletion:
    """The whole answers."""
    reader = build_tool_call_parser(body)
    return ChatCompletion(
        **build_envelope(reply.model, OBJECT, PREFIX),
        choices=[
            build_choice(index, one, reader, with_logprobs=bool(body.logprobs))
            for index, one in enumerate(reply.completions)
        ],
        usage=build_completions_usage(reply.completions, reply.discarded, body.n or 1),
    )


def build_choice(
    index: int, completion: Completion, reader: ToolCallParser | None, *, with_logprobs: bool
) -> ChatChoice:
    """One answer; with calls in place of its text where it is made of them."""
    calls = reader.parse_tool_calls(completion.text) if reader is not None else ()
    message = ChatMessage(role="assistant", content=None if calls else completion.text)
    if calls:
        message["tool_calls"] = [build_tool_call(call) for call in calls]
    return ChatChoice(
        index=index,
        message=message,
        logprobs=build_logprobs(completion.tokens) if with_logprobs else None,
        finish_reason=map_finish_reason(completion.finished.reason, calls),
    )


def map_finish_reason(reason: FinishReason, calls: Sequence[FunctionCall]) -> FinishReasonWord:
    """Why an answer ended, in OpenAI's words."""
    return "tool_calls" if calls else FINISH_REASONS[reason]


def build_tool_call(call: FunctionCall) -> ResponseToolCall:
    """A call under a name of its own, by which its result will refer to it."""
    return ResponseToolCall(
        id=f"call_{uuid.uuid4().hex[:24]}",
        type="function",
        function={"name": call.name, "arguments": call.arguments},
    )


def build_logprobs(tokens: Sequence[Token]) -> ChatLogprobs:
    """The tokens that made the text."""
    content = [
        ChatTokenLogprob(
            **build_token_logprob(token),
            top_logprobs=[build_token_logprob(one) for one in token.alternatives],
        )
        for token in tokens
        if not token.special
    ]
    return ChatLogprobs(content=content, refusal=None)


def build_token_logprob(token: Token | TopLogprob) -> ChatTopLogprob:
    """A token and how likely it was."""
    return ChatTopLogprob(
        token=token.text,
        logprob=clamp_logprob(token.logprob),
        bytes=list(token.text.encode("utf-8", "replace")),
    )


class ChatStreamChoice:
    """What is still to be told of one answer of a stream.

    Text that may yet turn out to be a call is held back. Parts are objects of `choices`.
    """

    def __init__(self, index: int, reader: ToolCallParser | None, *, with_logprobs: bool) -> None:
        self._index = index
        self._reader = reader  # None from when it is plain that the answer is no call
        self._with_logprobs = with_logprobs
        self._text = ""
        self._tokens: list[Token] = []

    def first(self) -> ChatChunkChoice:
        """The part that opens the message."""
        return self._part({"role": "assistant", "content": ""})

    def add_chunk(self, chunk: Chunk) -> Iterator[ChatChunkChoice]:
        """What can be told once `chunk` has come."""
        self._text += chunk.text
        if self._with_logprobs:
            self._tokens += [token for token in chunk.tokens if not token.special]
        if chunk.finished is None:
            if self._reader is not None:
                if self._reader.may_start_tool_call(self._text):
                    return
                self._reader = None
            yield from self._held_back()
            return
        calls = self._reader.parse_tool_calls(self._text) if self._reader is not None else ()
        if calls:
            told = [
                ResponseToolCall(index=i, **build_tool_call(call)) for i, call in enumerate(calls)
            ]
            yield self._part({"tool_calls": told})
        else:
            yield from self._held_back()
        yield self._part({}, map_finish_reason(chunk.finished.reason, calls))

    def _held_back(self) -> Iterator[ChatChunkChoice]:
        if self._text or self._tokens:
            part = self._part({"content": self._text})
            if self._with_logprobs:
                part["logprobs"] = build_logprobs(self._tokens)
            self._text, self._tokens = "", []
            yield part

    def _part(self, delta: ChatDelta, finish: FinishReasonWord | None = None) -> ChatChunkChoice:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": finish}


@dataclass(frozen=True, slots=True)
class ChatEvents:
    """The events of a stream."""

    stream: GenerationStream
    body: ChatBody

    async def events(self) -> AsyncGenerator[bytes, None]:
        """One event for each part, and `[DONE]`; those that are ready together in one piece."""
        head = build_envelope(self.stream.model, CHUNK_OBJECT, PREFIX)
        includes_usage = self.body.includes_usage
        reader = build_tool_call_parser(self.body)
        choices = [
            ChatStreamChoice(index, reader, with_logprobs=bool(self.body.logprobs))
            for index in range(len(self.stream.started))
        ]
        yield b"".join(
            encode_chunk(head, one.first(), includes_usage=includes_usage) for one in choices
        )
        async for parts in self.stream.batches():
            told = b"".join(
                encode_chunk(head, one, includes_usage=includes_usage)
                for part in parts
                for one in choices[part.choice].add_chunk(part.chunk)
            )
            if told:
                yield told
        if includes_usage:
            usage = build_usage(self.stream.started, self.stream.finished, len(choices))
            yield encode_usage(head, usage)
        yield DONE
