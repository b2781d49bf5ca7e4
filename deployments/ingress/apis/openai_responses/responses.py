"""Responses of the Responses API, whole and as a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator

import orjson

from deployments.errors import ServeError
from deployments.ingress.apis.openai.chat import (
    ChatStreamChoice,
    build_choice,
    build_tool_call_parser,
)
from deployments.ingress.apis.openai.responses import build_response_usage, build_usage
from deployments.ingress.apis.openai.schemas import CompletionDetails, GenerationUsage
from deployments.ingress.apis.openai.translated_chat import TranslatedChat
from deployments.ingress.apis.openai_responses.output import ResponseOutput, build_id
from deployments.ingress.apis.openai_responses.schemas import (
    FailureCode,
    FailureEvent,
    ResponseFailure,
    ResponseObject,
    ResponsesBody,
    ResponsesEvent,
    ResponseStateEvent,
    ResponseTokens,
)
from deployments.ingress.apis.shared.openai_error import build_openai_error
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.http.sse import build_named_event
from deployments.ingress.requests import GenerationResponse
from deployments.messages import SamplingParams
from deployments.registry import RegisteredModel


class ResponseBuilder:
    """Builder of one response, or of the events of one stream."""

    def __init__(self, body: ResponsesBody, parsed: TranslatedChat, model: RegisteredModel) -> None:
        self._chat = parsed.chat
        self._empty = build_empty_response(body, parsed.request.options.sampling, model)
        self._output = ResponseOutput()
        self._sent = 0  # events so far

    def build(self, response: GenerationResponse) -> ResponseObject:
        (completion,) = response.completions
        with_logprobs = bool(self._chat.logprobs)
        parser = build_tool_call_parser(self._chat)
        self._output.add_choice(build_choice(0, completion, parser, with_logprobs=with_logprobs))
        return self._build_end(build_response_usage(response, 1))

    async def encode(self, stream: GenerationStream) -> AsyncGenerator[bytes, None]:
        """Yield the events. Those that are ready at the same time are one piece of bytes."""
        choice = ChatStreamChoice(
            0, build_tool_call_parser(self._chat), with_logprobs=bool(self._chat.logprobs)
        )
        yield self._encode_events(self._start())
        async for parts in stream.batches():
            deltas = (delta for part in parts for delta in choice.add_chunk(part.chunk))
            events = (event for delta in deltas for event in self._output.add_delta(delta))
            if encoded := self._encode_events(events):
                yield encoded
        end = self._build_end(build_usage(stream.started, stream.finished, 1))
        is_incomplete = end["status"] == "incomplete"
        yield self._encode_events(
            [
                ResponseStateEvent(
                    type="response.incomplete" if is_incomplete else "response.completed",
                    response=end,
                )
            ]
        )

    def encode_error(self, error: ServeError) -> bytes:
        """Encode the last events of a failed stream."""
        return self._encode_events(self._fail(error))

    def _start(self) -> Iterator[ResponsesEvent]:
        yield ResponseStateEvent(type="response.created", response=self._empty)
        yield ResponseStateEvent(type="response.in_progress", response=self._empty)

    def _fail(self, error: ServeError) -> Iterator[ResponsesEvent]:
        if not self._sent:  # the generator failed before it started; clients expect a start
            yield from self._start()
        built = build_openai_error(error, for_generation=True)
        yield FailureEvent(
            type="error", code=built["code"], message=built["message"], param=built["param"]
        )
        failure = ResponseFailure(code=select_failure_code(error), message=built["message"])
        failed: ResponseObject = {
            **self._empty, "status": "failed", "output": self._output.items, "error": failure
        }  # fmt: skip
        yield ResponseStateEvent(type="response.failed", response=failed)

    def _build_end(self, usage: GenerationUsage) -> ResponseObject:
        end: ResponseObject = {
            **self._empty, "output": self._output.items, "usage": build_tokens(usage)
        }  # fmt: skip
        if self._output.is_incomplete:
            end["status"] = "incomplete"
            end["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            end["status"] = "completed"
            end["completed_at"] = int(time.time())
        return end

    def _encode_events(self, events: Iterable[ResponsesEvent]) -> bytes:
        encoded = []
        for event in events:
            event["sequence_number"] = self._sent
            self._sent += 1
            encoded.append(build_named_event(event["type"], orjson.dumps(event)))
        return b"".join(encoded)


def build_empty_response(
    body: ResponsesBody, sampling: SamplingParams, model: RegisteredModel
) -> ResponseObject:
    """Build a response without output, with the fields of the request as they apply."""
    text_format = body.text.format if body.text else None
    return ResponseObject(
        id=build_id("resp"),
        object="response",
        created_at=int(time.time()),
        status="in_progress",
        model=model.ref.id,
        output=[],
        usage=None,
        error=None,
        incomplete_details=None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        temperature=sampling.temperature,
        top_p=next(p for p in (body.top_p, sampling.top_p, 1.0) if p is not None),
        top_logprobs=body.top_logprobs or 0,
        tools=[tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
        tool_choice=body.tool_choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text={"format": text_format or {"type": "text"}},
        reasoning={"effort": body.reasoning and body.reasoning.effort, "summary": None},
        metadata=body.metadata or {},
        user=body.user,
        previous_response_id=None,
        store=False,
        background=False,
        truncation="disabled",
    )


def build_tokens(usage: GenerationUsage) -> ResponseTokens:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    no_reasoning = CompletionDetails(reasoning_tokens=0)
    return ResponseTokens(
        input_tokens=usage["prompt_tokens"],
        input_tokens_details={"cached_tokens": cached, "cache_write_tokens": 0},
        output_tokens=usage["completion_tokens"],
        output_tokens_details=usage.get("completion_tokens_details", no_reasoning),
        total_tokens=usage["total_tokens"],
    )


def select_failure_code(error: ServeError) -> FailureCode:
    if error.status >= 500:
        return "server_error"
    return "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
