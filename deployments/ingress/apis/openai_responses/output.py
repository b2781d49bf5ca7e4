"""The items of a response, built from the deltas of a chat, with the events that announce them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal

from deployments.ingress.apis.openai.schemas import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatTokenLogprob,
    ResponseToolCall,
)
from deployments.ingress.apis.openai_responses.schemas import (
    ArgumentsEvent,
    FunctionCallOutput,
    ItemStatus,
    OutputItem,
    OutputItemEvent,
    OutputMessage,
    OutputTextPart,
    PartEvent,
    ReasoningOutput,
    ReasoningTextPart,
    ResponsesEvent,
    TextEvent,
)

TextKind = Literal["message", "reasoning"]


class ResponseOutput:
    """The items of one response: reasoning, a message, and calls, in this order.

    The deltas of a text fill one item, which is done when another item follows, or at the end.
    """

    def __init__(self) -> None:
        self.items: list[OutputItem] = []  # those that are done
        # Whether `max_output_tokens` or the context ended the answer, or a stop string a call.
        self.is_incomplete = False
        self._open: OpenTextItem | None = None
        self._calls: list[ResponseToolCall] = []  # announced at the end, which tells their status

    def add_choice(self, choice: ChatChoice) -> None:
        """Add the items of a whole answer."""
        delta = ChatDelta(**choice["message"])
        logprobs = choice["logprobs"]
        if logprobs is not None and "tool_calls" in delta:
            content = select_content_tokens(logprobs["content"], delta["content"] or "")
            logprobs = {**logprobs, "content": content}
        whole = ChatChunkChoice(
            index=0,
            delta=delta,
            logprobs=logprobs,
            finish_reason=choice["finish_reason"],
        )
        for _ in self.add_delta(whole):
            pass

    def add_delta(self, choice: ChatChunkChoice) -> Iterator[ResponsesEvent]:
        """Add a delta. Yield the events that announce what it changes."""
        delta = choice["delta"]
        self._calls += delta.get("tool_calls", ())
        if reasoning := delta.get("reasoning_content"):
            yield from self._add_text("reasoning", reasoning)
        text = delta.get("content") or ""
        logprobs = choice["logprobs"]["content"] if choice["logprobs"] is not None else ()
        # The tokens of a call are not part of a message.
        if text or (logprobs and not self._calls):
            yield from self._add_text("message", text, logprobs)
        if choice["finish_reason"] is not None:
            are_calls_whole = choice["finish_reason"] == "tool_calls"
            is_call_cut = bool(self._calls) and not are_calls_whole
            self.is_incomplete = choice["finish_reason"] == "length" or is_call_cut
            yield from self._end(are_calls_whole=are_calls_whole)

    def _end(self, *, are_calls_whole: bool) -> Iterator[ResponsesEvent]:
        if not (self.items or self._open or self._calls):
            yield from self._add_text("message", "")
        is_cut = self.is_incomplete and not self._calls
        yield from self._close("incomplete" if is_cut else "completed")
        for number, call in enumerate(self._calls, start=1):
            is_whole = are_calls_whole or number < len(self._calls)  # only the last one may be cut
            yield from self._add_call(call, "completed" if is_whole else "incomplete")

    def _add_text(
        self, kind: TextKind, text: str, logprobs: Sequence[ChatTokenLogprob] = ()
    ) -> Iterator[ResponsesEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._close("completed")
            self._open = OpenTextItem(kind, len(self.items))
            yield from self._open.start()
        if text or logprobs:
            yield self._open.add(text, logprobs)

    def _close(self, status: ItemStatus) -> Iterator[ResponsesEvent]:
        if self._open is not None:
            yield from self._open.finish(status)
            self.items.append(self._open.build(status))
            self._open = None

    def _add_call(self, call: ResponseToolCall, status: ItemStatus) -> Iterator[ResponsesEvent]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = FunctionCallOutput(
            type="function_call",
            id=build_id("fc"),
            status=status,
            call_id=call["id"],
            name=name,
            arguments=arguments,
        )
        index = len(self.items)
        started: FunctionCallOutput = {**item, "status": "in_progress", "arguments": ""}
        yield OutputItemEvent(type="response.output_item.added", output_index=index, item=started)
        yield ArgumentsEvent(
            type="response.function_call_arguments.delta",
            item_id=item["id"],
            output_index=index,
            delta=arguments,
        )
        yield ArgumentsEvent(
            type="response.function_call_arguments.done",
            item_id=item["id"],
            output_index=index,
            arguments=arguments,
            name=name,
        )
        yield OutputItemEvent(type="response.output_item.done", output_index=index, item=item)
        self.items.append(item)


class OpenTextItem:
    """A message or a reasoning that is being written. It has one part with all its text."""

    def __init__(self, kind: TextKind, index: int) -> None:
        self.kind = kind
        self._index = index
        self._id = build_id("msg" if kind == "message" else "rs")
        self._text = ""
        self._logprobs: list[ChatTokenLogprob] = []

    def start(self) -> Iterator[ResponsesEvent]:
        item = self.build("in_progress")
        item["content"] = []
        yield OutputItemEvent(
            type="response.output_item.added", output_index=self._index, item=item
        )
        yield self._build_part_event("response.content_part.added")

    def add(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> ResponsesEvent:
        self._text += text
        self._logprobs += logprobs
        if self.kind == "reasoning":
            event = self._build_text_event("response.reasoning_text.delta")
        else:
            event = self._build_text_event("response.output_text.delta")
            event["logprobs"] = list(logprobs)
        event["delta"] = text
        return event

    def finish(self, status: ItemStatus) -> Iterator[ResponsesEvent]:
        if self.kind == "reasoning":
            event = self._build_text_event("response.reasoning_text.done")
        else:
            event = self._build_text_event("response.output_text.done")
            event["logprobs"] = self._logprobs
        event["text"] = self._text
        yield event
        yield self._build_part_event("response.content_part.done")
        yield OutputItemEvent(
            type="response.output_item.done", output_index=self._index, item=self.build(status)
        )

    def build(self, status: ItemStatus) -> OutputMessage | ReasoningOutput:
        if self.kind == "reasoning":
            return ReasoningOutput(
                type="reasoning",
                id=self._id,
                status=status,
                summary=[],
                content=[self._build_reasoning_part()],
            )
        return OutputMessage(
            type="message",
            id=self._id,
            status=status,
            role="assistant",
            content=[self._build_text_part()],
        )

    def _build_text_part(self) -> OutputTextPart:
        return {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def _build_reasoning_part(self) -> ReasoningTextPart:
        return {"type": "reasoning_text", "text": self._text}

    def _build_part_event(
        self, kind: Literal["response.content_part.added", "response.content_part.done"]
    ) -> PartEvent:
        is_message = self.kind == "message"
        return PartEvent(
            type=kind,
            item_id=self._id,
            output_index=self._index,
            content_index=0,
            part=self._build_text_part() if is_message else self._build_reasoning_part(),
        )

    def _build_text_event(
        self,
        kind: Literal[
            "response.output_text.delta",
            "response.output_text.done",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
        ],
    ) -> TextEvent:
        return TextEvent(type=kind, item_id=self._id, output_index=self._index, content_index=0)


def select_content_tokens(
    tokens: Sequence[ChatTokenLogprob], content: str
) -> list[ChatTokenLogprob]:
    """Return the tokens of `content`, which comes first; none if calls come before it."""
    if not "".join(token["token"] for token in tokens).startswith(content):
        return []
    chars = len(content)
    starts = accumulate((len(token["token"]) for token in tokens), initial=0)
    return [token for token, start in zip(tokens, starts, strict=False) if start < chars]


def build_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
