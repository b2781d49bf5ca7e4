"""Helpers for several completions of one prompt: seeds, ranking, timings."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from deployments.errors import ServeError, forget_frames
from deployments.messages import (
    CallTimings,
    Completion,
    Finished,
    GenerationOptions,
    Started,
    merge_timings,
)

T = TypeVar("T")

SEED_RANGE = 1 << 64


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all coroutines.

    If a coroutine raises, cancel the others and wait for them, then raise the exception.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, ServeError):
                forget_frames(outcome)


def offset_seed(options: GenerationOptions, candidate: int) -> GenerationOptions:
    """Add `candidate` to the seed: equal seeds would give equal completions."""
    seed = options.sampling.seed
    if seed is None or candidate == 0:
        return options
    return options._replace(
        sampling=options.sampling._replace(seed=(seed + candidate) % SEED_RANGE)
    )


def select_best(
    completions: Sequence[Completion], candidates_per_prompt: int, choices: int
) -> tuple[tuple[Completion, ...], tuple[Completion, ...]]:
    """Return the best `choices` completions per prompt, and the discarded completions.

    The best have the highest mean log probability. If none is discarded, the order is unchanged.
    """
    if candidates_per_prompt == choices:
        return tuple(completions), ()
    selected: list[Completion] = []
    discarded: list[Completion] = []
    for start in range(0, len(completions), candidates_per_prompt):
        candidates = completions[start : start + candidates_per_prompt]
        ranked = sorted(candidates, key=mean_logprob, reverse=True)
        selected += ranked[:choices]
        discarded += ranked[choices:]
    return tuple(selected), tuple(discarded)


def mean_logprob(completion: Completion) -> float:
    """Return the mean log probability of the tokens; minus infinity if no token has one."""
    logprobs = [token.logprob for token in completion.tokens if token.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def combine_timings(
    started: Sequence[Started], finished: Sequence[Finished], candidates_per_prompt: int
) -> CallTimings:
    """Combine all completions of a request: the longest time of each phase, the sum of tokens.

    The tokens of a prompt count once for all its candidates.
    """
    timings = [completion.timings for completion in finished]
    slowest = merge_timings(timings)
    return CallTimings(
        tokenize_s=slowest.tokenize_s,
        queue_s=slowest.queue_s,
        forward_s=max((one.prefill_s + one.decode_s for one in timings), default=0.0),
        tokens=sum(one.prompt_tokens for one in started[::candidates_per_prompt])
        + sum(completion.generated_tokens for completion in finished),
    )
