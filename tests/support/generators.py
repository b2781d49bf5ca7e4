"""Fake generator client with scripted replies, hanging calls, failures and counters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from deployments.errors import ServeError
from deployments.messages import (
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
TIMINGS = GenerationTimings(queue_s=0.001, prefill_s=0.002, decode_s=0.003, tokenize_s=0.0005)


class ScriptedReply(NamedTuple):
    """Reply to one call, with one token per piece. Reason END adds an end token."""

    pieces: tuple[str, ...] = ("Hel", "lo")
    reason: FinishReason = FinishReason.END
    refusal: ServeError | None = None  # raised before the first event
    breaks: ServeError | None = None  # raised instead of the last chunk
    hangs: bool = False  # hangs instead of the last chunk
    is_silent: bool = False  # hangs before the first event
    waits_for: asyncio.Event | None = None  # event to await before the first event
    logprob: float = -0.5  # same for each token
    cached_tokens: int = 1
    prompt: tuple[Token, ...] = ()  # tokens of the prompt; empty: one for each word or id
    reasoning: tuple[str, ...] = ()  # pieces before the text
    stop: str = ""  # the stop string of the reason STOP


class ScriptedGeneratorClient:
    """A GeneratorClient that replies to each call with `reply_to(call)`."""

    def __init__(self, reply_to: Callable[[GenerationCall], ScriptedReply] | None = None) -> None:
        self.calls: list[GenerationCall] = []
        self.open = 0  # running streams
        self.most_open = 0
        self.events_read = 0  # events read by clients
        self._reply_to = reply_to or (lambda call: ScriptedReply())

    async def complete(self, call: GenerationCall) -> Completion:
        started: Started | None = None
        chunks: list[Chunk] = []
        async for event in self.stream(call):
            if isinstance(event, Started):
                started = event
            else:
                chunks.append(event)
        assert started is not None
        finished = chunks[-1].finished
        assert finished is not None
        text = "".join(chunk.text for chunk in chunks)
        tokens = tuple(token for chunk in chunks for token in chunk.tokens)
        return Completion(started, text, tokens, finished)

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        """Yield the events of a scripted reply. Let other tasks run before each event."""
        self.calls.append(call)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            async for event in _stream_reply(call, self._reply_to(call)):
                await asyncio.sleep(0)
                yield event
                self.events_read += 1
        finally:
            self.open -= 1

    async def tokenize_prompt(self, call: GenerationCall) -> tuple[int, ...]:
        self.calls.append(call)
        return tuple(range(len(split_prompt(call))))


async def _stream_reply(
    call: GenerationCall, reply: ScriptedReply
) -> AsyncGenerator[Started | Chunk, None]:
    if reply.refusal is not None:
        raise reply.refusal
    if reply.is_silent:
        await asyncio.Event().wait()
    if reply.waits_for is not None:
        await reply.waits_for.wait()
    yield build_started(call, reply)
    for number, piece in enumerate(reply.reasoning, start=60):
        yield Chunk("", (build_token(call, reply, number, piece)._replace(reasoning=True),))
    for number, piece in enumerate(reply.pieces):
        yield Chunk(piece, (build_token(call, reply, number, piece),))
    if reply.breaks is not None:
        raise reply.breaks
    if reply.hangs:
        await asyncio.Event().wait()
    has_end_token = reply.reason is FinishReason.END
    last = (build_token(call, reply, 99, "")._replace(special=True),) if has_end_token else ()
    tokens = len(reply.reasoning) + len(reply.pieces) + len(last)
    finished = Finished(reply.reason, tokens, TIMINGS, len(reply.reasoning), reply.stop)
    yield Chunk("", last, finished)


def build_token(call: GenerationCall, reply: ScriptedReply, number: int, piece: str) -> Token:
    """Return a token with as many alternatives as the call requests."""
    count = call.options.logprobs
    if count is None:
        return Token(number, piece)
    others = tuple(TopLogprob(50 + i, f"alt{i}", reply.logprob - i - 1) for i in range(count))
    return Token(number, piece, reply.logprob, alternatives=others)


def build_started(call: GenerationCall, reply: ScriptedReply) -> Started:
    """Return the first event. Each word or id of the prompt is one token."""
    words = split_prompt(call)
    prompt: tuple[Token, ...] = ()
    if call.options.prompt_logprobs:
        prompt = reply.prompt or tuple(
            Token(number, word, None if number == 0 else -1.0) for number, word in enumerate(words)
        )
    seed = call.options.sampling.seed
    return Started(
        len(words), reply.cached_tokens, 7 if seed is None else seed, COMPUTE_TYPE, prompt
    )


def split_prompt(call: GenerationCall) -> list[str]:
    """Return the words of a prompt or conversation. Token ids become words such as `<5>`."""
    prompt = call.prompt
    if isinstance(prompt, Chat):
        return [word for message in prompt.messages for word in message["content"].split()]
    if isinstance(prompt, str):
        words = prompt.split()
        return [word if i == 0 else f" {word}" for i, word in enumerate(words)]
    return [f"<{number}>" for number in prompt]
