"""What the API families that generate text share: from a parsed question to text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NamedTuple

from deployments.generation.messages import Chunk, Completion, GenerationOptions, Prompt, Started
from deployments.ingress.http.options import RequestOptions
from deployments.registry import OpenModel


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationQuestion:
    """One prompt, whichever API it came through."""

    prompt: Prompt
    options: GenerationOptions = field(default_factory=GenerationOptions)
    model_id: str | None = None  # None: the first model that generates text
    choices: int = 1  # answers wanted; their seeds count up from the one given
    best_of: int | None = None  # answers computed, of which the likeliest `choices` are told
    request: RequestOptions = field(default_factory=RequestOptions)


@dataclass(frozen=True, slots=True)
class GenerationReply:
    """The answers, best first where there was a choice, and what is worth telling about them."""

    model: OpenModel
    completions: tuple[Completion, ...]
    total_s: float
    passed_over: tuple[Completion, ...] = ()  # computed for `best_of`


class Part(NamedTuple):
    """A chunk of one of the answers of a stream."""

    choice: int
    chunk: Chunk


class GenerationStream:
    """Answers on their way; closing it frees their slots. Iterating raises ServeError."""

    model: OpenModel
    started: tuple[Started, ...]  # one for each choice

    def __aiter__(self) -> AsyncIterator[Part]:
        raise NotImplementedError

    async def aclose(self) -> None:
        """Stop generating."""
        raise NotImplementedError


class GenerationService:
    """The ingress without HTTP, for text generation."""

    async def complete(self, question: GenerationQuestion) -> GenerationReply:
        """The whole answers to one request. Raises ServeError."""
        raise NotImplementedError

    async def stream(self, question: GenerationQuestion) -> GenerationStream:
        """The answers as they come, once every one has started. Raises ServeError."""
        raise NotImplementedError
