"""Delivery of the outputs of a call whose items run in several passes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from deployments.batching.calls import BatchGroup, QueuedCall, QueuedItem, deliver
from deployments.batching.passes import PassResult
from tests.support.fakes import far_deadline, item
from tests.unit.deployments.batching.conftest import MODEL


@pytest.mark.parametrize("first", [0, 1])
async def test_call_of_several_passes_reports_its_longest_wait_and_largest_pass(first: int) -> None:
    call = QueuedCall(
        group=BatchGroup(MODEL, unpooled=False),
        client="",
        future=asyncio.get_running_loop().create_future(),
        deadline_s=far_deadline(),
        rows=[None, None],
        missing=2,
        tokens=5,
    )
    passes = [
        (PassResult("cpu", started_s=10.0, forward_s=0.5), 8),
        (PassResult("cpu", started_s=13.0, forward_s=0.25), 2),
    ]
    for index in (first, 1 - first):
        done, items = passes[index]
        queued = QueuedItem(item(index), call, index, price=1.0, arrived_s=9.0)
        deliver(queued, np.array([index], np.float32), done, items)
    outputs = await call.future
    assert outputs.rows == [[0], [1]]
    timings = outputs.timings
    assert (timings.queue_s, timings.forward_s) == (4.0, 0.5)
    assert (timings.batch_items, timings.tokens) == (8, 5)
