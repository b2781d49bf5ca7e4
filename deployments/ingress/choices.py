"""Several answers to one request: computed together, told apart by their seeds, and chosen from."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from deployments.generation.messages import Completion, Finished, GenerationOptions, Started
from deployments.messages import Timings

T = TypeVar("T")

# Seeds are 64 bits wide.
SEEDS = 1 << 64


async def all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What each gives, computed side by side. When one fails the others are over before it is told.

    Raises what the first to fail raises.
    """
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def seeded(options: GenerationOptions, number: int) -> GenerationOptions:
    """The options of one of several answers to a prompt: equal seeds would give equal answers."""
    seed = options.sampling.seed
    if seed is None or number == 0:
        return options
    return options._replace(sampling=options.sampling._replace(seed=(seed + number) % SEEDS))


def chosen(
    completions: Sequence[Completion], computed: int, choices: int
) -> tuple[tuple[Completion, ...], tuple[Completion, ...]]:
    """The likeliest `choices` of each prompt's `computed` answers, and the others."""
    if computed == choices:
        return tuple(completions), ()
    told: list[Completion] = []
    passed_over: list[Completion] = []
    for start in range(0, len(completions), computed):
        ranked = sorted(completions[start : start + computed], key=mean_logprob, reverse=True)
        told += ranked[:choices]
        passed_over += ranked[choices:]
    return tuple(told), tuple(passed_over)


def mean_logprob(completion: Completion) -> float:
    """How likely the model found an answer: the mean over its tokens; the least for none."""
    known = [token.logprob for token in completion.tokens if token.logprob is not None]
    return sum(known) / len(known) if known else float("-inf")


def timings_of(started: Sequence[Started], finished: Sequence[Finished], computed: int) -> Timings:
    """Where a request's time went; a prompt's tokens count once, however often it is answered."""
    ended = [one.timings for one in finished]
    return Timings(
        queue_s=max((one.queue_s for one in ended), default=0.0),
        forward_s=max((one.prefill_s + one.decode_s for one in ended), default=0.0),
        tokens=sum(one.prompt_tokens for one in started[::computed])
        + sum(one.generated_tokens for one in finished),
    )
