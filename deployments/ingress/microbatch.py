"""Collecting calls into lists before the first hop.

A hop between deployments costs about a millisecond however little it carries, so requests that
arrive together travel together. One open list per BatchKey.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from deployments.config import MicroBatchSettings
from deployments.messages import Call, Outcome

Send = Callable[[list[Call]], Awaitable[list[Outcome]]]
Collect = Callable[[Call], Awaitable[Outcome]]
Batched = Callable[[Send, MicroBatchSettings], Collect]


def serve_batched(send: Send, settings: MicroBatchSettings) -> Collect:
    """`send` behind @serve.batch; works inside a Serve replica only."""
    from ray import serve

    async def send_list(calls: list[Call]) -> list[Outcome]:
        return await send(calls)

    collect: Collect = serve.batch(
        max_batch_size=settings.max_batch_size,
        batch_wait_timeout_s=settings.batch_wait_timeout_s,
        max_concurrent_batches=settings.max_concurrent_batches,
    )(send_list)
    return collect
