"""Answers of `/v1/completions`, whole and in parts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from deployments.generation.messages import Chunk, Completion, Prompt, Started, Token
from deployments.ingress.apis.openai.responses import (
    DONE,
    FINISH_REASONS,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    build_completions_usage,
    build_envelope,
    build_usage,
    clamp_logprob,
    encode_chunk,
    encode_usage,
)
from deployments.ingress.apis.openai.schemas import CompletionBody
from deployments.ingress.generation import GenerationRequest, GenerationResponse, GenerationStream

OBJECT, PREFIX = "text_completion", "cmpl"


def build_completion_response(
    reply: GenerationResponse, question: GenerationRequest, body: CompletionBody
) -> CompletionResponse:
    """The whole answers."""
    choices = [
        build_choice(
            index,
            drop_text(one) if body.max_tokens == 0 else one,
            _prompt_of(question, index),
            body,
        )
        for index, one in enumerate(reply.completions)
    ]
    usage = build_completions_usage(reply.completions, reply.discarded, question.choices)
    if body.max_tokens == 0:
        usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    return CompletionResponse(
        **build_envelope(reply.model, OBJECT, PREFIX), choices=choices, usage=usage
    )


def drop_text(completion: Completion) -> Completion:
    """A completion without its text, of which nobody asked for any."""
    return completion._replace(text="", tokens=())


def _prompt_of(question: GenerationRequest, index: int) -> Prompt:
    return question.prompts[index // question.choices]


def build_choice(
    index: int, completion: Completion, prompt: Prompt, body: CompletionBody
) -> CompletionChoice:
    """One answer, behind its prompt where that is to be echoed."""
    told = CompletionStreamText(body, prompt, completion.started)
    return CompletionChoice(
        index=index,
        text=told.echoed + completion.text,
        logprobs=told.build_logprobs(completion.tokens),
        finish_reason=FINISH_REASONS[completion.finished.reason],
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

    def build_logprobs(self, tokens: Sequence[Token]) -> CompletionLogprobs | None:
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
        head = build_envelope(self.stream.model, OBJECT, PREFIX)
        texts = [
            CompletionStreamText(self.body, _prompt_of(self.question, index), started)
            for index, started in enumerate(self.stream.started)
        ]
        includes_usage = self.body.includes_usage
        for index, told in enumerate(texts):
            if told.echoed:
                choice = self._choice(index, told, Chunk(told.echoed, ()))
                yield encode_chunk(head, choice, includes_usage=includes_usage)
        async for parts in self.stream.batches():
            choices = [
                self._choice(part.choice, texts[part.choice], part.chunk)
                for part in parts
                if self._is_worth_telling(part.chunk)
            ]
            if choices:
                yield b"".join(
                    encode_chunk(head, choice, includes_usage=includes_usage) for choice in choices
                )
        if includes_usage:
            yield encode_usage(
                head,
                build_usage(self.stream.started, self.stream.finished, self.question.choices),
            )
        yield DONE

    def _is_worth_telling(self, chunk: Chunk) -> bool:
        told = bool(chunk.tokens) and self.body.logprobs is not None
        return bool(chunk.text) or told or chunk.finished is not None

    def _choice(self, index: int, told: CompletionStreamText, chunk: Chunk) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=chunk.text,
            logprobs=told.build_logprobs(chunk.tokens),
            finish_reason=None if chunk.finished is None else FINISH_REASONS[chunk.finished.reason],
        )
