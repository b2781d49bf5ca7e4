"""Collecting calls into lists before the first hop.

A hop between deployments costs about a millisecond however little it carries, so requests that
arrive together travel together. One open list per BatchKey.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from deployments.artifacts.types import Device
from deployments.config import MicroBatchSettings
from deployments.errors import DeadlineExceeded, ServeError
from deployments.messages import BatchKey, Call, CallBatch, CallResult, Outcome
from deployments.transports.base import EncoderClient


class MicroBatchRouter:
    """Owns the open micro-batches of one ingress replica."""

    def __init__(
        self,
        clients: Mapping[Device, EncoderClient],
        batched: MicroBatcher,
        settings: MicroBatchSettings,
    ) -> None:
        self._clients = clients
        self._batched = batched
        self._settings = settings
        self._collectors: dict[BatchKey, Submit] = {}

    @property
    def settings(self) -> MicroBatchSettings:
        """How lists are collected."""
        return self._settings

    def configure(self, settings: MicroBatchSettings) -> None:
        """Collect new calls by other rules; lists under way finish by the old ones."""
        if settings != self._settings:
            self._settings = settings
            self._collectors = {}

    async def run(self, key: BatchKey, call: Call) -> CallResult:
        """The call's answer. Raises its ServeError; DeadlineExceeded after its deadline."""
        collect = self._collectors.get(key)
        if collect is None:
            collect = self._batched(partial(self._send, key), self._settings)
            self._collectors[key] = collect
        try:
            async with asyncio.timeout(call.deadline_s - time.time()):
                outcome = await collect(call)
        except TimeoutError as exc:
            raise DeadlineExceeded("the request took longer than it may") from exc
        if isinstance(outcome, ServeError):
            raise outcome
        return outcome

    async def _send(self, key: BatchKey, calls: list[Call]) -> list[Outcome]:
        """One list down the chain; a failure of the hop is every call's outcome."""
        # Nobody waits longer than the last deadline, so neither does the list: an encoder that
        # never starts must not hold on to lists whose callers are gone.
        timeout_s = max(call.deadline_s for call in calls) - time.time()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._clients[key.device].infer(CallBatch(key, tuple(calls)))
        except TimeoutError:
            return [DeadlineExceeded("the encoder did not answer in time")] * len(calls)
        except ServeError as error:
            return [error] * len(calls)


SendMicroBatch = Callable[[list[Call]], Awaitable[list[Outcome]]]
Submit = Callable[[Call], Awaitable[Outcome]]
MicroBatcher = Callable[[SendMicroBatch, MicroBatchSettings], Submit]


def serve_micro_batches(send: SendMicroBatch, settings: MicroBatchSettings) -> Submit:
    """`send` behind @serve.batch; works inside a Serve replica only."""
    from ray import serve

    async def send_list(calls: list[Call]) -> list[Outcome]:
        return await send(calls)

    collect: Submit = serve.batch(
        max_batch_size=settings.max_batch_size,
        batch_wait_timeout_s=settings.batch_wait_timeout_s,
        max_concurrent_batches=settings.max_concurrent_batches,
    )(send_list)
    return collect
