"""The models that stay in the memory of a replica, even if many other models are requested."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from deployments.config import AppArgs
from deployments.errors import HardwareUnavailable
from deployments.messages import ModelRef
from deployments.registry import ModelRegistry, RegisteredModel
from deployments.replicas.model_pool import ModelPool

log = logging.getLogger("ray.serve.hundredfold")

T = TypeVar("T")

CHECK_INTERVAL_S = 2.0  # seconds between reads of the list of pinned models


class PinnedModels:
    """The default versions of the configured models, and of the models that `plan.json` pins.

    A new default version is loaded before the first request needs it. Reads of the store may block
    for long, such as on a network file system, so they have a thread of their own: the event loop
    uses the models of the last read.
    """

    def __init__(self, args: AppArgs, serves: Callable[[RegisteredModel], bool]) -> None:
        """Read the list of pinned models, without those for which `serves` returns False.

        Raises ArtifactError if the configuration names a version that is not usable, and
        PlanUnusable for an invalid plan.
        """
        self._registry = ModelRegistry(args.store_path(), args.models, verify=False)
        self._serves = serves
        self._reader = ThreadPoolExecutor(1, "pinned-models")
        self._refs = frozenset(model.ref for model in self._read())
        self._following: asyncio.Task[None] | None = None

    def refs(self) -> frozenset[ModelRef]:
        """Return the pinned models of the last read.

        After `start`, there is a read every CHECK_INTERVAL_S while the store answers.
        """
        return self._refs

    def load_into(self, pool: ModelPool[T]) -> None:
        """Load all pinned models at the start of a replica. Blocks.

        Raises the error of a model whose version the configuration names, so that a rollout keeps
        the previous replicas. The errors of other models, and HardwareUnavailable, are only logged.
        Calls of such a model get the error later.
        """
        models = self._read()
        self._refs = frozenset(model.ref for model in models)
        for model in models:
            try:
                pool.load_now(model.ref)
            except Exception as error:  # which the pool has logged
                is_needed = self._registry.has_fixed_version(model.ref.id)
                if is_needed and not isinstance(error, HardwareUnavailable):
                    raise

    def start(self, pool: ModelPool[T]) -> None:
        """Load newly pinned models in the background from now on. Call it in an event loop."""
        self._following = asyncio.get_running_loop().create_task(self._follow(pool))

    def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        self._reader.shutdown(wait=False)

    def _read(self) -> list[RegisteredModel]:
        """Read the list of pinned models. Blocks. The registry allows one caller at a time."""
        return [model for model in self._registry.list_kept_loaded() if self._serves(model)]

    async def _follow(self, pool: ModelPool[T]) -> None:
        run = asyncio.get_running_loop().run_in_executor
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                models = await run(self._reader, self._read)
            except Exception:  # such as a store that is not available for a moment
                log.exception("the list of pinned models cannot be read; it is read again soon")
                continue
            self._refs = frozenset(model.ref for model in models)
            try:
                pool.keep(self._refs)
                await pool.trim()
            except Exception:  # this task must go on
                log.exception("pinned models cannot be loaded; they are tried again soon")
