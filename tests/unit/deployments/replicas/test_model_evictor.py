from __future__ import annotations

import asyncio
from collections import OrderedDict

from deployments.messages import ModelRef
from deployments.replicas.model_evictor import ModelEvictor
from deployments.replicas.pool_entry import PoolEntry
from deployments.replicas.pool_memory import PoolMemory

SIZE = 10


async def test_evict_all_leaves_out_models_that_others_evict_meanwhile() -> None:
    refs = [ModelRef(name, "0" * 12) for name in ("a", "b", "c")]
    memory, may_close = PoolMemory(len(refs) * SIZE, None), asyncio.Event()
    assert memory.take(len(refs) * SIZE, is_pinned=False)
    closed: list[str] = []

    async def close(ref: ModelRef, _model: str) -> None:
        await may_close.wait()
        closed.append(ref.id)

    evictor = ModelEvictor(
        OrderedDict((ref, PoolEntry(ref.id, SIZE, 0.0)) for ref in refs),
        memory,
        pinned=frozenset,
        close=close,
        on_evict=lambda _ref: None,
        clock=lambda: 0.0,
    )
    everything = asyncio.create_task(evictor.evict_all())
    await asyncio.sleep(0)  # the first model is being closed
    unloading = asyncio.create_task(evictor.evict(refs[1]))
    await asyncio.sleep(0)
    may_close.set()
    await asyncio.gather(everything, unloading)
    assert sorted(closed) == ["a", "b", "c"]
    assert memory.bytes == 0
