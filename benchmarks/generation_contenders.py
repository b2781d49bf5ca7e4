"""Who is measured: each is given prompts of equal length, and all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.generation_answers import Ask, Heat, TextService, Tokens, ask_all

OURS = "hundredfold"
SERVED = "hundredfold over HTTP"
UNDRAFTED = "hundredfold, no drafts"
GENAI = "onnxruntime-genai"
TRANSFORMERS = "transformers bf16"
PAGED = "transformers bf16, paged"
LLAMA = "llama.cpp"


class Contender(Protocol):
    """Something that writes text."""

    @property
    def name(self) -> str:
        """As in the result."""
        ...

    @property
    def most_streams(self) -> int | None:
        """At once; None: any number."""
        ...

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> Heat:
        """An answer of so many tokens to each prompt, greedy. Raises ServeError."""
        ...


@dataclass(frozen=True, slots=True)
class Streaming:
    """A Contender over a TextService: as many readers as prompts, all from the same moment on."""

    name: str
    service: TextService
    runner: asyncio.Runner
    most_streams: int | None = field(default=None, init=False)

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> Heat:
        """All streams together. Raises ServeError."""
        asks = [Ask(prompt, new_tokens) for prompt in prompts]
        return Heat(self.runner.run(ask_all(self.service, asks)))
