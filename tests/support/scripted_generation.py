"""A generator with scripted chunks behind the real ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from deployments.messages import (
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
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.in_process import InProcess

MODELS = (EMBEDDER, DECODER)
TIMINGS = GenerationTimings(queue_s=0.01, prefill_s=0.02, decode_s=0.04, tokenize_s=0.001)
PROMPT_TOKENS = (Token(5, "Once"), Token(6, " upon", -2.5))
OTHERS = (TopLogprob(7, " a", -0.25), TopLogprob(9, " the", -1.75))


def ending(reason: FinishReason = FinishReason.END, tokens: int = 4) -> Finished:
    return Finished(reason, tokens, TIMINGS)


# Chunks of two words and an end token. The second word has two tokens.
CHUNKS = (
    Chunk(" a", (Token(7, " a", -0.25, alternatives=OTHERS),)),
    Chunk(" time", (Token(11, " ti", -0.5), Token(12, "me", -1.0))),
    Chunk("", (Token(2, "", -0.125, special=True),), ending()),
)
TEXT = " a time"


@dataclass
class ScriptedGenerator:
    """Generator that yields `chunks` for each call and records the calls.

    It raises errors in `chunks`. If no chunk is `finished`, the stream waits until it is closed.
    """

    chunks: Sequence[Chunk | Exception] = CHUNKS
    refusal: Exception | None = None  # raised before anything starts
    pause_s: float = 0.0  # pause before every chunk
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    calls: list[GenerationCall] = field(default_factory=list)
    running: int = 0
    hung: int = 0  # streams that have waited after their last chunk

    async def complete(self, call: GenerationCall) -> Completion:
        chunks: list[Chunk] = []
        async with aclosing(self.stream(call)) as stream:
            async for event in stream:
                if isinstance(event, Started):
                    started = event
                else:
                    chunks.append(event)
        tokens = tuple(token for chunk in chunks for token in chunk.tokens)
        finished = chunks[-1].finished
        assert finished is not None
        return Completion(started, "".join(chunk.text for chunk in chunks), tokens, finished)

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        self.calls.append(call)
        if self.refusal is not None:
            raise self.refusal
        seed = 42 if call.options.sampling.seed is None else call.options.sampling.seed
        prompt = PROMPT_TOKENS if call.options.prompt_logprobs else ()
        self.running += 1
        try:
            yield Started(len(PROMPT_TOKENS), self.cached_tokens, seed, "cpu-int4", prompt)
            for chunk in self.chunks:
                await asyncio.sleep(self.pause_s)
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
                if chunk.finished is not None:
                    return
            for _ in range(10):  # first let the ingress take the last chunk
                await asyncio.sleep(0)
            self.hung += 1
            await asyncio.Event().wait()
        finally:
            self.running -= 1


async def ask(
    store: Path, generator: ScriptedGenerator, path: str, body: Any, **options: Any
) -> httpx.Response:
    options = {"models": MODELS, "generator": generator, **options}
    async with InProcess(store, **options).client() as http:
        return await http.post(path, json=body)


def events_in(body: bytes) -> list[Any]:
    """Parse the body of a stream. Assert that no event has a space after `data:`."""
    *events, rest = body.split(b"\n\n")
    assert rest == b""
    for event in events:
        assert event.startswith(b"data:{")
    return [orjson.loads(event.removeprefix(b"data:")) for event in events]
