"""Answers of `/v1/completions`, whole and in parts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from deployments.generation.messages import Chunk, Completion, Prompt, Started, Token
from deployments.ingress.apis.openai.responses import (
    DONE,
    FINISHES,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    chunk_event,
    clamp_logprob,
    head_of,
    usage_event,
    usage_of,
    usage_of_completions,
)
from deployments.ingress.apis.openai.schemas import CompletionBody
from deployments.ingress.generation import GenerationRequest, GenerationResponse, GenerationStream

OBJECT, PREFIX = "text_completion", "cmpl"


def build_completion_response(
    reply: GenerationResponse, question: GenerationRequest, body: CompletionBody
) -> CompletionResponse:
    """The whole answers."""
    choices = [
        whole_choice(
            index,
            drop_text(one) if body.max_tokens == 0 else one,
            _prompt_of(question, index),
            body,
        )
        for index, one in enumerate(reply.completions)
    ]
    usage = usage_of_completions(reply.completions, reply.discarded, question.choices)
    if body.max_tokens == 0:
        usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    return CompletionResponse(**head_of(reply.model, OBJECT, PREFIX), choices=choices, usage=usage)


def drop_text(completion: Completion) -> Completion:
    """A completion without its text, of which nobody asked for any."""
    return completion._replace(text="", tokens=())


def _prompt_of(question: GenerationRequest, index: int) -> Prompt:
    return question.prompts[index // question.choices]


def whole_choice(
    index: int, completion: Completion, prompt: Prompt, body: CompletionBody
) -> CompletionChoice:
    """One answer, behind its prompt where that is to be echoed."""
    told = CompletionStreamText(body, prompt, completion.started)
    return CompletionChoice(
        index=index,
        text=told.echoed + completion.text,
        logprobs=told.logprobs_of(completion.tokens),
        finish_reason=FINISHES[completion.finished.reason],
    )


class CompletionStreamText:
    """What has been told of one text so far."""

    def __init__(self, body: CompletionBody, prompt: Prompt, started: Started) -> None:
        self._with_logprobs = body.logprobs is not None
        self._tokens_ahead = started.prompt if body.echo else ()
        self._offset = 0  # characters, where the next token begins
        self.echoed = ""  # what stands in front of the text
        if body.echo:
            is_text = isinstance(prompt, str)
            self.echoed = str(prompt) if is_text else "".join(t.text for t in started.prompt)

    def logprobs_of(self, tokens: Sequence[Token]) -> CompletionLogprobs | None:
        """The next tokens, those of an echoed prompt in front; None where nobody asked."""
        if not self._with_logprobs:
            return None
        told = (*self._tokens_ahead, *tokens)
        self._tokens_ahead = ()
        offsets: list[int] = []
        for token in told:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return CompletionLogprobs(
            tokens=[token.text for token in told],
            token_logprobs=[
                None if token.logprob is None else clamp_logprob(token.logprob) for token in told
            ],
            top_logprobs=[build_top_logprobs(token) for token in told],
            text_offset=offsets,
        )


def build_top_logprobs(token: Token) -> dict[str, float] | None:
    """The likeliest tokens, and the one that came; None for a prompt's first token."""
    if token.logprob is None:
        return None
    # Of tokens that look alike the likeliest counts; it comes first.
    top: dict[str, float] = {}
    for alternative in token.alternatives:
        top.setdefault(alternative.text, clamp_logprob(alternative.logprob))
    top.setdefault(token.text, clamp_logprob(token.logprob))
    return top


@dataclass(frozen=True, slots=True)
class CompletionEvents:
    """The events of a stream."""

    stream: GenerationStream
    question: GenerationRequest
    body: CompletionBody

    async def events(self) -> AsyncGenerator[bytes, None]:
        """One event for each part, and `[DONE]`; those that are ready together in one piece."""
        head = head_of(self.stream.model, OBJECT, PREFIX)
        texts = [
            CompletionStreamText(self.body, _prompt_of(self.question, index), started)
            for index, started in enumerate(self.stream.started)
        ]
        usage_wanted = self.body.usage_wanted
        for index, told in enumerate(texts):
            if told.echoed:
                choice = self._choice(index, told, Chunk(told.echoed, ()))
                yield chunk_event(head, choice, usage_wanted=usage_wanted)
        async for parts in self.stream.batches():
            choices = [
                self._choice(part.choice, texts[part.choice], part.chunk)
                for part in parts
                if self._is_worth_telling(part.chunk)
            ]
            if choices:
                yield b"".join(
                    chunk_event(head, choice, usage_wanted=usage_wanted) for choice in choices
                )
        if usage_wanted:
            yield usage_event(
                head,
                usage_of(self.stream.started, self.stream.finished, self.question.choices),
            )
        yield DONE

    def _is_worth_telling(self, chunk: Chunk) -> bool:
        told = bool(chunk.tokens) and self.body.logprobs is not None
        return bool(chunk.text) or told or chunk.finished is not None

    def _choice(self, index: int, told: CompletionStreamText, chunk: Chunk) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=chunk.text,
            logprobs=told.logprobs_of(chunk.tokens),
            finish_reason=None if chunk.finished is None else FINISHES[chunk.finished.reason],
        )
