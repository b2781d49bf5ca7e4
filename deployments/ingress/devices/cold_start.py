"""Limit of the time that a request waits for a deployment without running replicas."""

from __future__ import annotations

import asyncio
from types import TracebackType

from deployments.artifacts.types import Device
from deployments.errors import DeadlineExceeded, ModelLoading
from deployments.ingress.devices.cluster_state import (
    REFRESH_STARTING_S,
    ClusterMonitor,
    model_loading_error,
)
from deployments.registry import RegisteredModel


class limit_cold_start:
    """Context manager that raises ModelLoading if no replica runs after `wait_s` seconds.

    If `wait_s` is None, the wait has no limit. If the block ends with DeadlineExceeded and no
    replica runs, ModelLoading replaces this error. No timer is started while a replica runs.
    """

    __slots__ = ("_device", "_ending", "_model", "_monitor", "_timeout", "_wait_s")

    def __init__(
        self, monitor: ClusterMonitor, model: RegisteredModel, device: Device, wait_s: float | None
    ) -> None:
        self._monitor = monitor
        self._model = model
        self._device = device
        self._wait_s = wait_s
        self._timeout: asyncio.Timeout | None = None
        self._ending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self._wait_s is not None and self._is_cold():
            self._timeout = await asyncio.timeout(None).__aenter__()
            self._ending = asyncio.create_task(self._end_if_cold(self._timeout, self._wait_s))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timeout is not None and self._ending is not None:
            self._ending.cancel()
            try:
                await self._timeout.__aexit__(kind, error, traceback)
            except TimeoutError as exc:
                raise self._build_error() from exc
        if isinstance(error, DeadlineExceeded):
            # Read the status only if needed: a read takes 40 ms of CPU time, and many requests of
            # an overloaded server exceed their deadline.
            if self._is_cold() or self._monitor.age_s > REFRESH_STARTING_S:
                await self._monitor.refresh_with_timeout()
            if self._is_cold():
                raise self._build_error() from None

    def _build_error(self) -> ModelLoading:
        return model_loading_error(self._monitor, self._model, self._device)

    def _is_cold(self) -> bool:
        return self._monitor.states_for(self._model)[self._device].running == 0

    async def _end_if_cold(self, timeout: asyncio.Timeout, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await self._monitor.refresh_with_timeout()
        if self._is_cold():
            timeout.reschedule(asyncio.get_running_loop().time())
