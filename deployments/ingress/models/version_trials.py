"""Trials of new model versions, before requests that name no version use them.

In a trial, a replica loads the version and computes a short input with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from math import inf

from deployments.deadlines import is_expired, remaining_s
from deployments.errors import (
    ArtifactError,
    DeadlineExceeded,
    EngineFailed,
    HardwareUnavailable,
    RequirementMissing,
    ServeError,
)
from deployments.health import MIN_QUARANTINE_S
from deployments.messages import ModelRef
from deployments.registry import ModelRegistry, RegisteredModel

log = logging.getLogger("ray.serve.hundredfold")

TRIAL_TIMEOUT_S = 120.0  # limit for one load; after a timeout, the trial is repeated later
# Seconds between the two attempts to load a version. A failure to read files or to allocate memory
# looks like a damaged version, but may be temporary. Replicas repeat the error of a failed load for
# MIN_QUARANTINE_S, so an earlier attempt would fail in any case.
RETRY_S = MIN_QUARANTINE_S + 0.5
# Maximum seconds that a request waits for the trial. Afterwards the request uses the new version,
# although the result of the trial is not known.
MAX_WAIT_S = 10.0


class VersionTrials:
    """Trials: a replica loads and tests a new version while the former version answers.

    Requests for a name without a former version wait for the trial, at most MAX_WAIT_S. If two
    attempts to load a version fail with ArtifactError or EngineFailed, `plan.json` of the store
    marks the version as refused. In every process, ids and aliases then resolve to another version.
    If this host cannot run the version, only this process avoids it, for AVOID_S of plan_file.py.
    After other errors, such as a full queue, the trial is repeated later.
    """

    def __init__(
        self, registry: ModelRegistry, load: Callable[[RegisteredModel], Awaitable[None]]
    ) -> None:
        self._registry = registry
        self._load = load
        self._running: dict[ModelRef, asyncio.Task[bool]] = {}
        registry.start_trial = self.start

    def start(self, model: RegisteredModel) -> asyncio.Task[bool]:
        """Start a trial, or join a running one.

        The task returns whether ids and aliases now resolve to another version.
        """
        task = self._running.get(model.ref)
        if task is None:
            # In an empty context, the permissions of the request's API key do not limit the trial.
            task = asyncio.get_running_loop().create_task(self._try(model), context=Context())
            self._running[model.ref] = task
            task.add_done_callback(lambda _: self._running.pop(model.ref, None))
        return task

    async def is_refused_after_trial(
        self, name: str, model: RegisteredModel, deadline_s: float = inf
    ) -> bool:
        """Try `model` if its version needs a trial. Return whether the trial refuses the version.

        Returns False if no trial is needed, if the trial has no result, or if it takes longer than
        MAX_WAIT_S. After a refusal, `name` resolves to another version.

        Raises DeadlineExceeded if the request's deadline passes during the trial.
        """
        if not self._registry.needs_trial(name, model.ref):
            return False
        task = self.start(model)
        await asyncio.wait({task}, timeout=min(MAX_WAIT_S, remaining_s(deadline_s)))
        if not task.done() and is_expired(deadline_s):
            raise DeadlineExceeded("the deadline passed while a new version of the model loads")
        return task.done() and not task.cancelled() and task.result()

    async def _try(self, model: RegisteredModel) -> bool:
        try:
            await self._load_twice(model)
        except RequirementMissing as error:
            return self._avoid(model, error)
        except HardwareUnavailable as error:  # or the hardware may be away for a moment
            if error.lacks_graph:
                return self._avoid(model, error)
            log.warning("version %s is tried again: %s", model.ref.name, error.message)
        except (ArtifactError, EngineFailed) as error:
            log.error("version %s gets no requests: %s", model.ref.name, error.message)
            return await self._refuse(model, error)
        except Exception as error:  # noqa: BLE001  the former version answers meanwhile
            log.warning("version %s is tried again: %r", model.ref.name, error)
        else:
            log.info("version %s passes its probe", model.ref.name)
            self._registry.accept(model.ref)
        return False

    def _avoid(self, model: RegisteredModel, error: ServeError) -> bool:
        """Let other versions answer for some minutes: other hosts or settings may run this one."""
        log.warning("version %s is tried again in minutes: %s", model.ref.name, error.message)
        self._registry.avoid(model, error.message)
        return True

    async def _load_twice(self, model: RegisteredModel) -> None:
        try:
            await self._load_in_time(model)
        except RequirementMissing:
            raise
        except (ArtifactError, EngineFailed) as error:
            log.warning("version %s is tried once more: %s", model.ref.name, error.message)
            await asyncio.sleep(RETRY_S)
            await self._load_in_time(model)

    async def _load_in_time(self, model: RegisteredModel) -> None:
        async with asyncio.timeout(TRIAL_TIMEOUT_S):
            await self._load(model)

    async def _refuse(self, model: RegisteredModel, error: ServeError) -> bool:
        try:
            await asyncio.to_thread(self._registry.refuse, model, error.message)
        except ServeError as exc:
            # Such as on a read-only store. Then this process alone refuses the version.
            log.warning("the refusal of %s is not recorded: %s", model.ref.name, exc.message)
            return self._avoid(model, error)
        self._registry.follow_plan()
        return True
