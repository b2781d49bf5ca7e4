"""Queued calls of an encoder replica, and the delivery of their outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.batching.passes import PassResult
from deployments.errors import ServeError
from deployments.messages import CallTimings, ModelRef, TokenizedItem


@dataclass(frozen=True, slots=True)
class CallOutputs:
    """Outputs of the items of one call."""

    rows: Sequence[NDArray[np.float32]]  # one per item, in the call's order; shapes as in ModelHead
    compute_type: str  # names the engine of the call's last pass; tuning may replace engines
    timings: CallTimings


class BatchGroup(NamedTuple):
    """Properties that all items of a pass share."""

    model: ModelRef
    unpooled: bool


@dataclass(slots=True)
class QueuedCall:
    """One submitted call until all of its items are computed."""

    group: BatchGroup
    client: str
    future: asyncio.Future[CallOutputs]
    deadline_s: float  # time.monotonic
    rows: list[NDArray[np.float32] | None]
    missing: int
    tokens: int
    queue_s: float = 0.0
    forward_s: float = 0.0
    batch_items: int = 0
    price: float = 0.0  # seconds of one thread for the items that still wait; see prices.py
    measured_at: int = 0  # a prediction may drop the call once its model has run this many passes


@dataclass(slots=True)
class QueuedItem:
    tokens: TokenizedItem
    call: QueuedCall
    index: int
    price: float
    arrived_s: float  # time.perf_counter


def deliver(
    item: QueuedItem, result: NDArray[np.float32] | ServeError, done: PassResult, batch_items: int
) -> None:
    call = item.call
    if call.future.done():
        return
    if isinstance(result, ServeError):
        call.future.set_exception(result)
        return
    call.rows[item.index] = result
    call.missing -= 1
    call.queue_s = max(call.queue_s, done.started_s - item.arrived_s)
    call.forward_s = max(call.forward_s, done.forward_s)
    call.batch_items = max(call.batch_items, batch_items)
    if call.missing == 0:
        timings = CallTimings(
            queue_s=call.queue_s,
            forward_s=call.forward_s,
            tokens=call.tokens,
            batch_items=call.batch_items,
        )
        rows = [row for row in call.rows if row is not None]
        call.future.set_result(CallOutputs(rows, done.compute_type, timings))
