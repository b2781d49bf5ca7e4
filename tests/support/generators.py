"""Generators that behave: they say what a test tells them to, hang, break, and count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from deployments.errors import ServeError
from deployments.generation.messages import (
    Chat,
    Chunk,
    Completion,
    Finished,
    FinishReason,
    GenerationCall,
    GenerationTimings,
    Started,
    Token,
    TopLogprob,
)

COMPUTE_TYPE = "cpu-fake"
TIMINGS = GenerationTimings(queue_s=0.001, prefill_s=0.002, decode_s=0.003)


class ScriptedReply(NamedTuple):
    """How one call is answered. A token is a piece; one that ends by itself has an end token."""

    pieces: tuple[str, ...] = ("Hel", "lo")
    reason: FinishReason = FinishReason.END
    refusal: ServeError | None = None  # before anything is said
    breaks: ServeError | None = None  # in place of the end
    hangs: bool = False  # likewise
    drop_text: bool = False  # hangs before the prompt is computed
    logprob: float = -0.5  # of each token
    cached_tokens: int = 1


class ScriptedGeneratorClient:
    """A GeneratorClient that answers each call with `speech_of` it."""

    def __init__(self, speech_of: Callable[[GenerationCall], ScriptedReply] | None = None) -> None:
        self.calls: list[GenerationCall] = []
        self.open = 0  # answers being made
        self.said = 0  # chunks taken
        self._speech_of = speech_of or (lambda call: ScriptedReply())

    async def complete(self, call: GenerationCall) -> Completion:
        """All of the stream."""
        started: Started | None = None
        chunks: list[Chunk] = []
        async for what in self.stream(call):
            if isinstance(what, Started):
                started = what
            else:
                chunks.append(what)
        assert started is not None
        finished = chunks[-1].finished
        assert finished is not None
        text = "".join(chunk.text for chunk in chunks)
        tokens = tuple(token for chunk in chunks for token in chunk.tokens)
        return Completion(started, text, tokens, finished)

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        """Each piece a chunk; others get their turn before each."""
        self.calls.append(call)
        self.open += 1
        try:
            async for what in _spoken(call, self._speech_of(call)):
                await asyncio.sleep(0)
                yield what
                self.said += 1
        finally:
            self.open -= 1


async def _spoken(
    call: GenerationCall, speech: ScriptedReply
) -> AsyncGenerator[Started | Chunk, None]:
    if speech.refusal is not None:
        raise speech.refusal
    if speech.drop_text:
        await asyncio.Event().wait()
    yield started_of(call, speech)
    for number, piece in enumerate(speech.pieces):
        yield Chunk(piece, (token_of(call, speech, number, piece),))
    if speech.breaks is not None:
        raise speech.breaks
    if speech.hangs:
        await asyncio.Event().wait()
    ends_itself = speech.reason is FinishReason.END
    last = (token_of(call, speech, 99, "")._replace(special=True),) if ends_itself else ()
    yield Chunk("", last, Finished(speech.reason, len(speech.pieces) + len(last), TIMINGS))


def token_of(call: GenerationCall, speech: ScriptedReply, number: int, piece: str) -> Token:
    """A token of an answer, with as many alternatives as the call asks for."""
    wanted = call.options.logprobs
    if wanted is None:
        return Token(number, piece)
    others = tuple(TopLogprob(50 + i, f"alt{i}", speech.logprob - i - 1) for i in range(wanted))
    return Token(number, piece, speech.logprob, alternatives=others)


def started_of(call: GenerationCall, speech: ScriptedReply) -> Started:
    """The start; a prompt's tokens are its words, or its ids."""
    words = build_tgi_error(call)
    prompt: tuple[Token, ...] = ()
    if call.options.prompt_logprobs:
        prompt = tuple(
            Token(number, word, None if number == 0 else -1.0) for number, word in enumerate(words)
        )
    seed = call.options.sampling.seed
    return Started(
        len(words), speech.cached_tokens, 7 if seed is None else seed, COMPUTE_TYPE, prompt
    )


def build_tgi_error(call: GenerationCall) -> list[str]:
    """The prompt's words, its ids as words, or all words of a conversation."""
    prompt = call.prompt
    if isinstance(prompt, Chat):
        return [word for message in prompt.messages for word in message["content"].split()]
    if isinstance(prompt, str):
        words = prompt.split()
        return [word if i == 0 else f" {word}" for i, word in enumerate(words)]
    return [f"<{number}>" for number in prompt]
