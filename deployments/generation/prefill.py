"""Sizes of the chunks in which prompts are prefilled between decode steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from deployments.config import SchedulingSettings

# Minimum size of a prefill chunk. Kernels for one token round differently from kernels for several
# tokens. With chunks of one token, the output would depend on chunk sizes and the prefix cache.
MIN_CHUNK_TOKENS = 2
# Size of the last chunk of a prompt for a recurrent decoder. Generation prompts are shorter.
LAST_CHUNK_TOKENS = 16
MAX_LAST_CHUNK_TOKENS = LAST_CHUNK_TOKENS + MIN_CHUNK_TOKENS - 1
# Maximum duration of a prefill while no job decodes, in seconds. It is far below HANG_TIMEOUT_S
# (health.py), so that a prompt on a slow machine does not count as a hang.
MAX_IDLE_PREFILL_S = 2.0


def prefill_budget(
    tokens_per_s: float, settings: SchedulingSettings, *, is_decode_idle: bool
) -> int:
    """Return how many prompt tokens to prefill before the next decode step.

    While other jobs decode, `max_prefill_stall_ms` limits the duration. While no job decodes,
    MAX_IDLE_PREFILL_S limits the duration. `max_prefill_chunk_tokens` then limits the tokens too,
    so that a new request waits for at most one chunk. The limits on the duration never reduce the
    budget below `min_prefill_chunk_tokens`.
    """
    max_s = MAX_IDLE_PREFILL_S if is_decode_idle else settings.max_prefill_stall_ms / 1e3
    budget = max(settings.min_prefill_chunk_tokens, int(tokens_per_s * max_s))
    return min(budget, settings.max_prefill_chunk_tokens) if is_decode_idle else budget


def fits_min_chunk(remaining: int, budget: int, settings: SchedulingSettings) -> bool:
    """Return whether the budget covers the remaining prompt or a chunk of the minimum size."""
    return budget >= min(remaining, settings.min_prefill_chunk_tokens)


def chunk_size(remaining: int, max_tokens: int) -> int:
    """Return the size of the next chunk of a prompt with `remaining` tokens, about `max_tokens`.

    The chunk has one token only if `remaining` is 1. It never leaves a single token for the next
    chunk (see MIN_CHUNK_TOKENS).
    """
    max_tokens = max(max_tokens, MIN_CHUNK_TOKENS)
    if remaining - max_tokens == 1:
        return max_tokens - 1 if max_tokens > MIN_CHUNK_TOKENS else remaining
    return min(remaining, max_tokens)


def resumable_chunk_size(remaining: int, max_tokens: int) -> int:
    """Return the size of the next chunk for a recurrent decoder.

    A later prompt with the same prefix can continue at the start of the last chunk only. That chunk
    is therefore short, but covers the end of a chat prompt, which is no part of the next turn's.
    """
    before_last = remaining - LAST_CHUNK_TOKENS
    return chunk_size(remaining if before_last < MIN_CHUNK_TOKENS else before_last, max_tokens)


def extend_first_chunk(tokens: int, done: int, remaining: int, min_end: int) -> int:
    """Extend a chunk of `tokens` tokens that would end before `min_end` and before its prompt.

    It follows `done` tokens, and never leaves a single token for the next chunk.
    """
    if tokens == remaining or done + tokens >= min_end:
        return tokens
    wanted = min_end - done
    return wanted if remaining - wanted >= MIN_CHUNK_TOKENS else remaining


class PrefillRate:
    """Prefill speed in tokens per second, estimated from recent chunks."""

    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s

    @contextmanager
    def measuring(self, tokens: int, min_tokens: int) -> Iterator[None]:
        """Measure a block that prefills `tokens` tokens."""
        started_s = time.perf_counter()
        yield
        self.update(tokens, time.perf_counter() - started_s, min_tokens)

    def update(self, tokens: int, elapsed_s: float, min_tokens: int) -> None:
        """Add a measurement. Chunks below `min_tokens` are slower, so they only raise the rate."""
        if elapsed_s > 0:
            # Adopt a slower rate at once and a faster rate gradually, to respect the stall limit.
            measured = tokens / elapsed_s
            if measured >= self.tokens_per_s:
                self.tokens_per_s += 0.25 * (measured - self.tokens_per_s)
            elif tokens >= min_tokens:
                self.tokens_per_s = measured
