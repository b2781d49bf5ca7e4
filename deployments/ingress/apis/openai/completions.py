"""Responses of `/v1/completions`."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Sequence

from deployments.ingress.apis.openai.responses import (
    FINISH_REASONS,
    AlignedTokens,
    build_identity,
    build_response_usage,
    clamp_logprob,
)
from deployments.ingress.apis.openai.schemas import (
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
)
from deployments.ingress.apis.openai.streaming import encode_stream
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.requests import GenerationRequest, GenerationResponse
from deployments.messages import (
    Chunk,
    Completion,
    Finished,
    FinishReason,
    Prompt,
    Started,
    Token,
    TopLogprob,
)

_BLANKS = re.compile(r"\s+")
OBJECT, ID_PREFIX = "text_completion", "cmpl"


def build_completion_response(
    response: GenerationResponse, generation_request: GenerationRequest, body: CompletionBody
) -> CompletionResponse:
    """Build the response. With `max_tokens` 0 it has only the echoed prompt."""
    completions = response.completions
    usage = build_response_usage(response, generation_request.choices)
    if body.max_tokens == 0:
        completions = tuple(map(drop_text, completions))
        usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    choices = build_choices(
        generation_request, body, [completion.started for completion in completions]
    )
    return CompletionResponse(
        **build_identity(response.model, OBJECT, ID_PREFIX),
        choices=[
            choice.build_whole(completion)
            for choice, completion in zip(choices, completions, strict=True)
        ],
        usage=usage,
    )


def encode_completion_stream(
    stream: GenerationStream, generation_request: GenerationRequest, body: CompletionBody
) -> AsyncGenerator[bytes, None]:
    return encode_stream(
        stream,
        build_identity(stream.model, OBJECT, ID_PREFIX),
        build_choices(generation_request, body, stream.started),
        choices_per_prompt=generation_request.choices,
        includes_usage=body.includes_usage,
    )


def build_choices(
    generation_request: GenerationRequest, body: CompletionBody, started: Sequence[Started]
) -> list[CompletionStreamChoice]:
    """Build one choice per element of `started`, which lists all choices prompt by prompt."""
    prompts = generation_request.prompts
    return [
        CompletionStreamChoice(index, body, prompts[index // generation_request.choices], start)
        for index, start in enumerate(started)
    ]


def drop_text(completion: Completion) -> Completion:
    """Remove the generated text of a request with `max_tokens` 0, which generates one token."""
    finished = completion.finished._replace(reason=FinishReason.LENGTH)
    return completion._replace(text="", tokens=(), finished=finished)


class CompletionStreamChoice:
    """One choice of a response, built chunk by chunk or from a whole completion."""

    def __init__(self, index: int, body: CompletionBody, prompt: Prompt, started: Started) -> None:
        self._index = index
        self._with_logprobs = body.logprobs is not None
        self._tokens = AlignedTokens()
        # Tokens of the echoed prompt. The first logprobs of the choice include them.
        self._pending_prompt = started.prompt if body.echo else ()
        self._echoed_text = ""
        if body.echo:
            is_text = isinstance(prompt, str)
            self._echoed_text = (
                str(prompt) if is_text else "".join(token.text for token in started.prompt)
            )
        self._offset = len(self._echoed_text)  # characters of text before the next token

    def open(self) -> Iterator[CompletionChoice]:
        if self._echoed_text:
            yield self._build(self._echoed_text, (), None)

    def add_chunk(self, chunk: Chunk) -> Iterator[CompletionChoice]:
        tokens = self._tokens.take(chunk)
        has_logprobs = bool(tokens) and self._with_logprobs
        if chunk.text or has_logprobs or chunk.finished is not None:
            yield self._build(chunk.text, tokens, chunk.finished)

    def build_whole(self, completion: Completion) -> CompletionChoice:
        text = self._echoed_text + completion.text
        return self._build(text, self._tokens.take(completion), completion.finished)

    def _build(
        self, text: str, tokens: Sequence[Token], finished: Finished | None
    ) -> CompletionChoice:
        return CompletionChoice(
            index=self._index,
            text=text,
            logprobs=self._build_logprobs(tokens) if self._with_logprobs else None,
            finish_reason=None if finished is None else FINISH_REASONS[finished.reason],
        )

    def _build_logprobs(self, tokens: Sequence[Token]) -> CompletionLogprobs:
        offsets = locate_tokens(self._pending_prompt, self._echoed_text)
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        tokens = (*self._pending_prompt, *tokens)
        self._pending_prompt = ()
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[
                None if token.logprob is None else clamp_logprob(token.logprob) for token in tokens
            ],
            top_logprobs=[build_top_logprobs(token) for token in tokens],
            text_offset=offsets,
        )


def locate_tokens(prompt: Sequence[Token], text: str) -> list[int]:
    """Return the offset of each token of a prompt in its `text`.

    Special tokens that the tokenizer adds are not in the text, and take no space. Others may
    include the blanks next to them, which their names do not have.
    """
    offsets: list[int] = []
    end = 0
    for token in prompt:
        if not text.startswith(token.text, end):
            blanks = _BLANKS.match(text, end)
            if blanks is not None and text.startswith(token.text, blanks.end()):
                end = blanks.end()
        offsets.append(end)
        if not token.special or text.startswith(token.text, end):
            end += len(token.text)
    return offsets


def build_top_logprobs(token: Token) -> dict[str, float] | None:
    """Return the alternatives and the token itself; None for the first token of a prompt."""
    if token.logprob is None:
        return None
    # Several tokens may have the same text. Keep the most likely of them, which comes first.
    top: dict[str, float] = {}
    for alternative in token.alternatives:
        # Name the chosen token as `tokens` does: a special token of an answer has no text there.
        is_chosen = alternative.id == token.id
        text = token.text if is_chosen else name_alternative(alternative)
        top.setdefault(text, clamp_logprob(alternative.logprob))
    top.setdefault(token.text, clamp_logprob(token.logprob))
    return top


def name_alternative(alternative: TopLogprob) -> str:
    """Return a token's text; `bytes:...` for a part of a character, as in OpenAI's API."""
    if alternative.raw_bytes is None:
        return alternative.text
    return f"bytes:{alternative.raw_bytes.decode('ascii', 'backslashreplace')}"
