"""From a call to its answer: micro-batch, hop, and the deadline around both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial

from deployments.config import MicroBatchSettings
from deployments.errors import DeadlineExceeded, ServeError
from deployments.ingress.microbatch import Batched, Collect
from deployments.manifest import Device
from deployments.messages import Answer, BatchKey, Call, CallBatch, Outcome
from deployments.transports.base import LaneClient


class Router:
    """Owns the open micro-batches of one ingress replica."""

    def __init__(
        self,
        clients: Mapping[Device, LaneClient],
        batched: Batched,
        settings: MicroBatchSettings,
    ) -> None:
        self._clients = clients
        self._batched = batched
        self._settings = settings
        self._collectors: dict[BatchKey, Collect] = {}

    @property
    def settings(self) -> MicroBatchSettings:
        """How lists are collected."""
        return self._settings

    def configure(self, settings: MicroBatchSettings) -> None:
        """Collect new calls by other rules; lists under way finish by the old ones."""
        if settings != self._settings:
            self._settings = settings
            self._collectors = {}

    async def run(self, key: BatchKey, call: Call) -> Answer:
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
        # Nobody waits longer than the last deadline, so neither does the list: a lane that
        # never starts must not hold on to lists whose callers are gone.
        patience_s = max(call.deadline_s for call in calls) - time.time()
        try:
            async with asyncio.timeout(patience_s):
                return await self._clients[key.device].infer(CallBatch(key, tuple(calls)))
        except TimeoutError:
            return [DeadlineExceeded("the lane did not answer in time")] * len(calls)
        except ServeError as error:
            return [error] * len(calls)
