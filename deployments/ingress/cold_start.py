"""The wait of a request for a deployment without running replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deployments.artifacts.types import Device
from deployments.errors import DeadlineExceeded
from deployments.ingress.cluster_state import ClusterMonitor, model_loading_error
from deployments.registry import RegisteredModel


@asynccontextmanager
async def limit_cold_start(
    monitor: ClusterMonitor, model: RegisteredModel, device: Device, wait_s: float | None
) -> AsyncIterator[None]:
    """End the body after `wait_s` unless a replica runs by then; None sets no limit.

    Raises ModelLoading, also in place of DeadlineExceeded, if no replica runs at the end.
    """

    def is_cold() -> bool:
        return monitor.states_for(model)[device].running == 0

    async def end_if_cold(timeout: asyncio.Timeout, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await monitor.refresh_with_timeout()
        if is_cold():
            timeout.reschedule(asyncio.get_running_loop().time())

    try:
        async with asyncio.timeout(None) as timeout:
            if wait_s is None or not is_cold():
                yield
                return
            ending = asyncio.create_task(end_if_cold(timeout, wait_s))
            try:
                yield
            finally:
                ending.cancel()
    except TimeoutError as exc:
        if not timeout.expired():
            raise
        raise model_loading_error(model.ref.id) from exc
    except DeadlineExceeded:
        await monitor.refresh_with_timeout()
        if is_cold():
            raise model_loading_error(model.ref.id) from None
        raise
