"""What a generator's loop tells a reader, until the reader takes it."""

from __future__ import annotations

import asyncio

from deployments.errors import ServeError
from deployments.generation.messages import Chunk, Started


class Mailbox:
    """The news of one job, for one reader; chunks that nobody has taken yet become one.

    A reader that is more than `most_tokens` behind makes it full; it is the caller's to act.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._started: Started | None = None
        self._chunks: list[Chunk] = []
        self._error: ServeError | None = None
        self._news = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether the reader is too far behind."""
        return sum(len(chunk.tokens) for chunk in self._chunks) > self._most_tokens

    def put(self, what: Started | Chunk | ServeError) -> None:
        """Add news; called on the event loop."""
        if isinstance(what, Started):
            self._started = what
        elif isinstance(what, ServeError):
            self._error = what
        else:
            self._chunks.append(what)
        self._news.set()

    async def take(self) -> Started | Chunk:
        """The next news, once there is some. Raises the job's ServeError, after all chunks."""
        await self._news.wait()
        if self._started is not None:
            started, self._started = self._started, None
            self._rest()
            return started
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            self._rest()
            return joined(chunks)
        if self._error is None:
            raise AssertionError("this is a bug: a mailbox with news, and nothing in it")
        raise self._error

    def _rest(self) -> None:
        if not self._chunks and self._error is None:
            self._news.clear()


def joined(chunks: list[Chunk]) -> Chunk:
    """Several chunks of one answer as one."""
    if len(chunks) == 1:
        return chunks[0]
    text = "".join(chunk.text for chunk in chunks)
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    return Chunk(text, tokens, chunks[-1].finished)
