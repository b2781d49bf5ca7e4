"""How fast a graph generates on this machine: alone, in company, and when it reads a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from pydantic import BaseModel, ConfigDict

from build_artifacts.decoders.judging import ROWS
from deployments.engines.decoder import Decoder

_PROMPT_TOKENS = 256
_BEFORE = 128  # tokens that are in the memory of each row while it is timed


class Pace(BaseModel):
    """Tokens per second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    alone: float  # one row
    company: float  # ROWS rows together
    prompt: float

    def __str__(self) -> str:
        return (
            f"{self.alone:.0f} tokens/s for one row, {self.company:.0f} for {ROWS}, "
            f"{self.prompt:.0f} read"
        )


def room_for_pace(most_tokens: int) -> int:
    """The tokens of a row that `measure_pace` writes to."""
    return min(_PROMPT_TOKENS, most_tokens)


def measure_pace(engine: Decoder, seconds: float) -> Pace:
    """Time each of the three for a third of `seconds`. Raises EngineFailed."""
    context = engine.info.context
    before = min(_BEFORE, context - 1)
    most = engine.info.source_tokens or context
    prompt = np.arange(min(_PROMPT_TOKENS, most)) % engine.info.vocabulary
    if engine.info.source_tokens is not None:  # without a source a row has little to do
        for row in range(ROWS):
            engine.prefill(row, prompt[:before].tolist(), 0)

    def decoding(rows: int) -> Callable[[], int]:
        ids = np.zeros(rows, np.int64)
        lengths = np.full(rows, before)

        def step() -> int:
            engine.decode(ids, lengths)
            return rows

        return step

    def reading() -> int:
        engine.prefill(0, prompt.tolist(), 0)
        return len(prompt)

    alone, company, read = (
        _tokens_per_second(work, seconds / 3) for work in (decoding(1), decoding(ROWS), reading)
    )
    return Pace(alone=alone, company=company, prompt=read)


def _tokens_per_second(work: Callable[[], int], seconds: float) -> float:
    work()  # what the first call allocates is not counted
    tokens, started_s = 0, time.perf_counter()
    while True:
        tokens += work()
        took_s = time.perf_counter() - started_s
        if took_s >= seconds:
            return tokens / took_s
