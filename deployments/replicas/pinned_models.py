"""The models that stay in the memory of a replica, however many others are requested."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from deployments.config import AppArgs
from deployments.errors import HardwareUnavailable, ServeError
from deployments.messages import ModelRef
from deployments.registry import ModelRegistry, RegisteredModel
from deployments.replicas.model_pool import ModelPool

log = logging.getLogger("ray.serve.hundredfold")

T = TypeVar("T")

CHECK_INTERVAL_S = 2.0  # between looks at what is pinned


class PinnedModels:
    """The configured models and those that the plan pins, in the versions that answer by default.

    A version that becomes the default one is loaded before the first request needs it.
    """

    def __init__(self, args: AppArgs, serves: Callable[[RegisteredModel], bool]) -> None:
        """`serves` tells which models are for this kind of replica. Raises ArtifactError."""
        self._registry = ModelRegistry(args.store_path(), args.models, verify=False)
        self._serves = serves
        self._following: asyncio.Task[None] | None = None

    def refs(self) -> frozenset[ModelRef]:
        return frozenset(model.ref for model in self._registry.pinned() if self._serves(model))

    def load_into(self, pool: ModelPool[T]) -> None:
        """Load all at the start of a replica. Blocks.

        Raises the error of a model whose version the configuration names, so that a rollout keeps
        the replicas before. Other errors are those of the calls that need the model.
        """
        for model in self._registry.pinned():
            if not self._serves(model):
                continue
            try:
                pool.load_now(model.ref)
            except ServeError as error:
                log.error("model %s cannot be loaded: %s", model.ref.name, error)
                is_needed = self._registry.must_load(model.ref.id)
                if is_needed and not isinstance(error, HardwareUnavailable):
                    raise

    def start(self, pool: ModelPool[T]) -> None:
        """Load what is pinned from now on, in the background. Call it in an event loop."""
        self._following = asyncio.get_running_loop().create_task(self._follow(pool))

    def close(self) -> None:
        if self._following is not None:
            self._following.cancel()

    async def _follow(self, pool: ModelPool[T]) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                pool.keep(self.refs())
            except Exception:  # such as a store that is gone for a moment
                log.exception("the pinned models are not known; the next look is soon")
