"""The events of a stream: one for each token, the last one with the whole text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import orjson

from deployments.errors import ServeError
from deployments.generation.messages import Chunk, Finished, Started, Token
from deployments.ingress.families.text_generation.answers import REASONS, token_facts, top_tokens
from deployments.ingress.families.text_generation.errors import words_of
from deployments.ingress.families.text_generation.messages import StreamDetails, TokenEvent
from deployments.ingress.families.text_generation.questions import NAMES, Asked
from deployments.ingress.generation import Part
from deployments.ingress.http.wording import fields_called


def event(value: Any) -> bytes:
    """`value` as an event. There is no space behind the colon in this dialect."""
    return b"data:" + orjson.dumps(value) + b"\n\n"


def error_event(error: ServeError) -> bytes:
    """A failure in the middle of a stream."""
    return event(words_of(error)[1])


async def events_of(
    batches: AsyncIterator[list[Part]], started: Started, asked: Asked
) -> AsyncGenerator[bytes, None]:
    """The events of a stream of one answer. Raises ServeError in the words of the body."""
    writer = EventWriter(started, asked)
    with fields_called(NAMES):
        async for parts in batches:
            told = (event(one) for part in parts for one in writer.events(part.chunk))
            if body := b"".join(told):
                yield body


class EventWriter:
    """Counts the tokens and keeps the text of one answer."""

    def __init__(self, started: Started, asked: Asked) -> None:
        self._started = started
        self._asked = asked
        self._texts: list[str] = []
        self._index = 0
        self._tells_others = bool(asked.parameters.top_n_tokens)

    def events(self, chunk: Chunk) -> Iterator[TokenEvent]:
        """One for each token; a last chunk without any gets one that adds nothing."""
        self._texts.append(chunk.text)
        tokens = chunk.tokens
        if chunk.finished is not None and not tokens:
            tokens = (Token(id=0, text="", logprob=0.0, special=True),)
        last = len(tokens) - 1
        for place, token in enumerate(tokens):
            one = self._event(token)
            if chunk.finished is not None and place == last:
                self._finish(one, chunk.finished)
            yield one

    def _event(self, token: Token) -> TokenEvent:
        self._index += 1
        one: TokenEvent = {
            "index": self._index,
            "token": token_facts(token),
            "generated_text": None,
            "details": None,
        }
        if self._tells_others:
            one["top_tokens"] = top_tokens(token)
        return one

    def _finish(self, last: TokenEvent, finished: Finished) -> None:
        (prompt,) = self._asked.prompts
        last["generated_text"] = self._asked.shown(prompt, "".join(self._texts))
        last["details"] = StreamDetails(
            finish_reason=REASONS[finished.reason],
            generated_tokens=finished.generated_tokens,
            input_length=self._started.prompt_tokens,
            seed=self._asked.seed_told(self._started),
        )
