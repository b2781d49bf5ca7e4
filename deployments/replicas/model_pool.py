"""Models in the memory of a replica: loaded on demand, bounded by bytes, evicted by last use.

A call leases its model, and a leased model is not evicted. Calls for one model wait for a single
load. Different models load at the same time, in threads. Pinned models are not evicted. A failed
load is not repeated for a while, so that a broken model does not keep the threads busy.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from deployments.errors import ModelUnavailable, ServeError
from deployments.host.native_heap import return_free_memory
from deployments.host.thread_priority import lower_thread_priority
from deployments.messages import LoadedModel, ModelRef, PoolRequest, PoolState
from deployments.registry import RegisteredModel, open_model
from deployments.replicas.device_memory import DeviceMemory
from deployments.replicas.failed_loads import FailedLoads
from deployments.replicas.model_evictor import ModelEvictor
from deployments.replicas.pool_entry import PoolEntry, PoolLoad
from deployments.replicas.pool_memory import PoolMemory
from deployments.tokenization.encodings import translate_panics

log = logging.getLogger("ray.serve.hundredfold")

T = TypeVar("T")

LOADING_THREADS = 4


class ModelLoader(NamedTuple, Generic[T]):
    """Operations of a replica on a model. They block, run in threads and may raise ServeError."""

    measure: Callable[[RegisteredModel], int]  # bytes of memory that the model will take
    load: Callable[[RegisteredModel], T]
    close: Callable[[ModelRef, T], None]
    size_settings: str = ""  # the settings that determine `measure`, for error messages
    limit_setting: str = "pool_bytes"  # the setting of `max_bytes`, for error messages


class ModelPool(Generic[T]):
    """Pool of models. Use it from one event loop; `load_now` may run before the loop starts."""

    def __init__(
        self,
        store: Path,
        loader: ModelLoader[T],
        max_bytes: int | None,
        pinned: Callable[[], Collection[ModelRef]] = frozenset,
        clock: Callable[[], float] = time.monotonic,
        device_memory: DeviceMemory | None = None,
    ) -> None:
        """Create an empty pool.

        `pinned` returns the models that must not be evicted at present. The result changes over
        time, so the pool does not store it. See PoolMemory for `max_bytes` and `device_memory`.
        """
        self._memory = PoolMemory(
            max_bytes, device_memory, loader.size_settings, loader.limit_setting
        )
        self.on_change: Callable[[ModelRef, bool], None] = lambda _ref, _is_loaded: None
        self._store = store
        self._loader = loader
        self._pinned = pinned
        self._clock = clock
        # Ordered by last use, the least recently used first.
        self._entries: OrderedDict[ModelRef, PoolEntry[T]] = OrderedDict()
        self._loading: dict[ModelRef, PoolLoad] = {}
        self._evictor = ModelEvictor(
            self._entries, self._memory, pinned, self._close_model, self._report_eviction, clock
        )
        self._failures = FailedLoads(clock)
        self._threads = ThreadPoolExecutor(LOADING_THREADS, "models", lower_thread_priority)

    @property
    def bytes(self) -> int:
        """Bytes of all models that are loaded, being loaded or being closed."""
        return self._memory.bytes

    def __contains__(self, ref: ModelRef) -> bool:
        return ref in self._entries

    def refs(self) -> list[ModelRef]:
        return list(self._entries)

    def models(self) -> Iterator[T]:
        """Iterate over the models that are loaded or being closed, such as for a health check."""
        loaded = [entry.model for entry in self._entries.values()]
        return iter([*loaded, *self._evictor.list_closing()])

    def get(self, ref: ModelRef) -> T | None:
        """Return the model if it is loaded. Without a lease, it may be evicted at any time."""
        entry = self._entries.get(ref)
        return None if entry is None else entry.model

    def lease(self, ref: ModelRef, calls: int = 0) -> ModelLease[T]:
        """Return an asynchronous context that leases the model, and loads it first if needed.

        `hundredfold models ps` counts `calls` calls for the lease. The context raises the
        ServeError of a failed load, or ModelUnavailable if no memory is free for the model.
        """
        return ModelLease(self, ref, calls)

    def count_calls(self, ref: ModelRef, calls: int) -> None:
        self._entries[ref].rate.add(calls, self._clock())

    def hold(self, ref: ModelRef) -> None:
        """Lease a leased model once more, such as for a pass whose callers may disconnect."""
        self._entries[ref].leases += 1

    def release(self, ref: ModelRef) -> None:
        entry = self._entries.get(ref)
        if entry is None:  # the pool was closed
            return
        entry.leases -= 1
        if not entry.leases:
            self._evictor.notice_release()

    def load_now(self, ref: ModelRef) -> None:
        """Load a pinned model. Blocks. Raises the error of a failed load."""
        try:
            model = open_model(self._store, ref)
            size = self._loader.measure(model)
            if not self._memory.take(size, is_pinned=True):
                raise self._memory.build_refusal(ref, size)
            try:
                # Load in a thread of the pool, because the engine's threads inherit its priority.
                loaded = self._threads.submit(self._load_model, model).result()
            except BaseException:
                self._memory.give_back(size)
                raise
        except Exception as error:
            self._failures.add(ref, error)
            raise
        self._add(ref, loaded, size)

    def keep(self, refs: Collection[ModelRef]) -> None:
        """Load models in the background, unless they are loaded or have just failed to load."""
        for ref in refs:
            is_here = ref in self._entries or ref in self._loading
            if not is_here and not self._failures.delays(ref):
                self._start_load(ref)

    async def trim(self) -> None:
        """Evict models that are not pinned and not recently used, down to `max_bytes`.

        Pinned models may exceed the limit. Recently used models stay. When a pin moves to a new
        version of a model, the former version still answers requests until the new version has
        passed a test (ingress/models/version_trials.py).
        """
        await self._evictor.trim()

    async def unload(self, ref: ModelRef) -> bool:
        """Remove a model that no call uses. Return whether a model was removed."""
        entry = self._entries.get(ref)
        if entry is None or entry.leases:
            return False
        await self._evictor.evict(ref)
        return True

    @contextmanager
    def resizing(self, ref: ModelRef, size: int) -> Iterator[None]:
        """Count `size` bytes for a leased model after the context; in it, the former bytes too.

        An error keeps the former size. Raises ModelUnavailable if the device lacks the bytes.
        """
        entry, unused = self._entries[ref], size
        if not self._memory.take(size, is_pinned=True):
            raise ModelUnavailable(f"`gpu_memory` has no room for {size} more bytes of {ref.id}")
        try:
            yield
            unused, entry.size = entry.size, size
        finally:
            self._evictor.give_back(unused)

    def list_loaded(self) -> list[LoadedModel]:
        """List the models, the most recently used last."""
        now_s, pinned = self._clock(), self._pinned()
        return [e.describe(ref, now_s, is_pinned=ref in pinned) for ref, e in self._entries.items()]

    async def apply(self, request: PoolRequest) -> PoolState:
        """Run an operator's request. Raises the ServeError of a failed load."""
        if request.model is not None and request.action == "load":
            async with self.lease(request.model):
                pass
        elif request.model is not None and request.action == "unload":
            await self.unload(request.model)
        return PoolState(tuple(self.list_loaded()), self.bytes, self._memory.max_bytes)

    async def close(self) -> None:
        """Close all models. The caller ensures that no call runs any more."""
        for loading in list(self._loading.values()):
            loading.task.cancel()
        await self._evictor.evict_all()
        self.shut_down()

    def shut_down(self) -> None:
        """Stop the threads of a pool whose models need not be closed."""
        self._threads.shutdown(wait=False)
        self._memory.close()

    def lease_loaded(self, ref: ModelRef) -> T | None:
        """Lease and return the model if it is loaded, else return None."""
        entry = self._entries.get(ref)
        if entry is None:
            return None
        entry.leases += 1
        entry.used_s = self._clock()
        self._entries.move_to_end(ref)
        return entry.model

    async def load_and_lease(self, ref: ModelRef) -> T:
        """Load the model or join its load, and lease it. Raises the ServeError of a failed load."""
        loading = self._loading.get(ref)
        if loading is None:
            if (failure := self._failures.find(ref)) is not None:
                raise failure
            loading = self._start_load(ref)
        loading.waiters += 1
        try:
            error = await asyncio.shield(loading.task)
        except asyncio.CancelledError:
            if loading.is_done and ref in self._entries:
                self.release(ref)
            loading.waiters -= 1
            raise
        if error is not None:
            raise copy.copy(error)
        return self._entries[ref].model

    def _start_load(self, ref: ModelRef) -> PoolLoad:
        loading = PoolLoad()
        loading.task = asyncio.get_running_loop().create_task(self._load(ref, loading))
        self._loading[ref] = loading
        return loading

    async def _load(self, ref: ModelRef, loading: PoolLoad) -> ServeError | None:
        """Load a model and lease it to all waiting calls. Return the error of a failed load."""
        run = asyncio.get_running_loop().run_in_executor
        size, started_s = 0, time.perf_counter()
        try:
            if not await self._evictor.wait_for_close(ref):
                raise ModelUnavailable(f"Model {ref.id} is still being closed. Retry later")
            model = await run(self._threads, open_model, self._store, ref)
            needed = await run(self._threads, self._loader.measure, model)
            await self._evictor.take(ref, needed)
            size = needed
            loaded = await run(self._threads, self._load_model, model)
        except Exception as exception:  # noqa: BLE001  every waiting call gets the error
            self._evictor.give_back(size)
            return self._failures.add(ref, exception)
        except BaseException:
            self._evictor.give_back(size)
            raise
        finally:
            del self._loading[ref]
        self._failures.forget(ref)
        self._add(ref, loaded, size, leases=loading.waiters)
        loading.is_done = True
        elapsed_s = time.perf_counter() - started_s
        log.info(
            "model %s loaded in %.2f s: %d bytes, %d in all", ref.name, elapsed_s, size, self.bytes
        )
        return None

    def _load_model(self, model: RegisteredModel) -> T:
        with translate_panics():
            loaded = self._loader.load(model)
        return_free_memory()
        return loaded

    async def _close_model(self, ref: ModelRef, model: T) -> None:
        def close() -> None:
            self._loader.close(ref, model)
            return_free_memory()

        await asyncio.get_running_loop().run_in_executor(self._threads, close)

    def _report_eviction(self, ref: ModelRef) -> None:
        self.on_change(ref, False)

    def _add(self, ref: ModelRef, model: T, size: int, leases: int = 0) -> None:
        entry = PoolEntry(model, size, self._clock())
        entry.leases = leases
        self._entries[ref] = entry
        self.on_change(ref, True)


class ModelLease(Generic[T]):
    """Lease of a model; see `ModelPool.lease`. It costs a microsecond if the model is loaded."""

    __slots__ = ("_calls", "_pool", "_ref")

    def __init__(self, pool: ModelPool[T], ref: ModelRef, calls: int) -> None:
        self._pool = pool
        self._ref = ref
        self._calls = calls

    async def __aenter__(self) -> T:
        model = self._pool.lease_loaded(self._ref)
        if model is None:
            model = await self._pool.load_and_lease(self._ref)
        self._pool.count_calls(self._ref, self._calls)
        return model

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.release(self._ref)
