"""Model builds by a running server, for pulls and for requests that name a missing model.

The build queue in the store holds all state (deployments/builds/queue.py). An ingress replica
starts a builder process when builds wait and no process runs them. A lock lets only one builder
work at a time.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from deployments.builds.estimates import BuildStatus
from deployments.builds.process import BUSY, has_compiler, start_builder
from deployments.builds.queue import BuildQueue
from deployments.builds.record import ENDS, BuildState
from deployments.builds.sources import default_model_id, is_hub_id
from deployments.config import BuildSettings
from deployments.errors import (
    BuildFailed,
    Forbidden,
    InvalidField,
    ManifestInvalid,
    ModelLoading,
    ServeError,
)
from deployments.host.machine import advise_install
from deployments.keys.caller import current_caller
from deployments.plan.resolution import sealed_versions, split_name
from deployments.tasks import list_task_names

log = logging.getLogger("ray.serve.hundredfold")

POLL_S = 0.5  # interval between reads of a build's state
EVENT_S = 1.0  # interval between events of a watched build
MAX_WATCH_S = 100.0  # longest stream of events; clients then reconnect
SERVED_AFTER_S = 15.0  # time until every ingress replica finds a new model
FAILED_FOR_S = 600.0  # wait before a request may repeat a failed build; operators need not wait
IDLE_S = 10.0  # interval between reads of an empty queue, which other processes may fill
ELSEWHERE_S = 2.0  # interval between reads of the queue while another process runs the builds
STOP_S = 5.0  # time that a stopped builder has to write the record of its build
MAX_RESTART_S = 60.0  # longest pause between two starts of a failing builder

StartBuilder = Callable[[Path, int], subprocess.Popen[bytes]]


class BuildService:
    """Service of one ingress replica that starts, watches and runs builds.

    `is_served` returns whether requests can use a model id.
    """

    def __init__(
        self,
        queue: BuildQueue,
        is_served: Callable[[str], bool],
        start: StartBuilder = start_builder,
    ) -> None:
        self.settings = BuildSettings()
        self._queue = queue
        self._is_served = is_served
        self._start = start
        self._wake = asyncio.Event()

    @property
    def store(self) -> Path:
        return self._queue.store

    async def pull(
        self, source: str, model_id: str | None = None, task: str | None = None
    ) -> BuildStatus:
        """Queue a build for an operator, even if the last build of the model just failed.

        Return the status of the build. If a build of the model already waits or runs, queue no
        other build, whatever its `source` and `task`.

        The caller's key must permit both `model_id` and the default id of `source`. Otherwise a
        caller could copy a forbidden model under a permitted id.

        Raises Forbidden for a key without permission, or if `builds.allow_pull` is false. Raises
        InvalidField if the server has no compiler, or if `model_id`, `source` or `task` is invalid.
        Raises Overloaded if the build queue is full. Raises StoreNotWritable.
        """
        if not self.settings.allow_pull:
            raise Forbidden("this server pulls no models: `builds.allow_pull` is false")
        if not has_compiler():
            advice = advise_install("build,cpu")
            raise InvalidField(
                f"this server has no compiler: {advice}, or run `hundredfold build` on a host with "
                "the compiler and copy the version into this store",
                field="source",
            )
        if task is not None and task not in list_task_names():
            raise InvalidField(
                f"`task` is `{task}`; it must be one of {', '.join(list_task_names())}",
                field="task",
            )
        own_id = default_model_id(source)
        model_id = model_id or own_id
        for each in (own_id, model_id):
            current_caller().require_model(each)
        try:
            await self._submit(model_id, source, task)
        except ManifestInvalid as error:
            raise InvalidField(error.message, field="id") from error
        status = await self.status(model_id)
        if status is None:
            raise AssertionError("bug: a submitted build has no record")
        return status

    async def status(self, model_id: str) -> BuildStatus | None:
        """Return the status of a model's last build, without directories of this host.

        Return None if the model has no build, or if the model was removed after its build.

        Raises Forbidden if the API key does not permit the model.
        """
        current_caller().require_model(split_name(model_id)[0])
        try:
            status = await asyncio.to_thread(self._queue.status, model_id)
        except ManifestInvalid:  # the id is malformed, so no model has it
            return None
        if status is None:
            return None
        status = status.hide_directories()
        if status.state is not BuildState.READY:
            return status
        is_new = status.since_end_s < SERVED_AFTER_S
        return status if is_new or self._is_served(model_id) else None

    async def watch(self, model_id: str) -> AsyncGenerator[BuildStatus, None]:
        """Yield the status now, then every EVENT_S, for at most MAX_WATCH_S.

        The stream ends when the build ends. It is empty if the model has no build.
        """
        for _ in range(int(MAX_WATCH_S / EVENT_S)):
            status = await self.status(model_id)
            if status is None:
                return
            yield status
            if status.state in ENDS:
                return
            await asyncio.sleep(EVENT_S)

    async def wait_for_missing(
        self, model_id: str, error: ServeError, *, waits: bool, may_pull: bool
    ) -> None:
        """Wait until a missing model is served. Pull it if `may_pull` and the settings allow that.

        `error` is the error of the request that did not find the model. If `waits` is true, wait up
        to `builds.wait_s` seconds for the end of the build.

        Raises ModelLoading with the estimated time if the build has not ended by then. Raises
        BuildFailed with the reason if it failed. Raises `error` if no build can provide what the
        request names, or if the built model is not served within SERVED_AFTER_S. Raises Overloaded
        if the build queue is full, and also Forbidden or StoreNotWritable.
        """
        if self._is_served(model_id):  # so only the requested version is missing
            raise error
        status = await (self._find_or_pull if may_pull else self.status)(model_id)
        if waits:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.wait_s):
                    while status is not None and status.state not in ENDS:
                        await asyncio.sleep(POLL_S)
                        status = await self.status(model_id)
        if status is None:
            raise error
        if status.state is BuildState.FAILED:
            raise BuildFailed(f"Model {model_id} could not be built: {status.reason}")
        if status.state is not BuildState.READY:
            raise build_loading_error(status)
        await self._wait_until_served(model_id, error)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start builders while builds wait, including builds that an earlier server has queued.

        Do nothing on a server without a compiler.
        """
        task = asyncio.create_task(self._keep_building()) if has_compiler() else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _find_or_pull(self, model_id: str) -> BuildStatus | None:
        status = await self.status(model_id)
        # Clients send model names of other servers, such as `gpt-4`. These names lack an
        # organization. Requests therefore pull only ids with an organization.
        is_pullable = "/" in model_id and is_hub_id(model_id)
        may_pull = self.settings.allow_pull and is_pullable and has_compiler()
        is_new = status is None or (
            status.state is BuildState.FAILED and status.since_end_s > FAILED_FOR_S
        )
        if not (may_pull and is_new):
            return status
        # The hub may have another model of this name than that whose versions the store has.
        versions = await asyncio.to_thread(sealed_versions, self._queue.store, model_id)
        if versions:
            return status
        await self._submit(model_id, model_id)
        log.info("model %s is unknown and will be built", model_id)
        return await self.status(model_id)

    async def _submit(self, model_id: str, source: str, task: str | None = None) -> None:
        limit = self.settings.max_queued
        await asyncio.to_thread(self._queue.submit, model_id, source, task, max_queued=limit)
        self._wake.set()

    async def _wait_until_served(self, model_id: str, error: ServeError) -> None:
        for _ in range(int(SERVED_AFTER_S / POLL_S)):
            if self._is_served(model_id):
                return
            await asyncio.sleep(POLL_S)
        raise error

    async def _keep_building(self) -> None:
        pause_s = POLL_S
        while True:
            try:
                await self._wait_for_builds()
                code = await self._run_builder()
            except Exception as error:  # noqa: BLE001  later builds need this loop
                log.warning("no builder can be started: %r", error)
                code = 1
            if code != BUSY:  # BUSY: another builder runs the builds, so this one has not failed
                pause_s = POLL_S if code == 0 else min(2 * pause_s, MAX_RESTART_S)
            await asyncio.sleep(pause_s)

    async def _wait_for_builds(self) -> None:
        """Wait until a build needs a builder. Raises OSError if a lock cannot be read."""
        while True:
            self._wake.clear()
            if not await asyncio.to_thread(self._queue.pending):
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await self._wake.wait()
            elif await asyncio.to_thread(self._queue.needs_builder):
                return
            else:
                await asyncio.sleep(ELSEWHERE_S)

    async def _run_builder(self) -> int:
        """Run a builder until it ends; return its exit code. Cancellation stops the builder.

        A later builder resumes the interrupted build. Raises OSError if the builder cannot start.
        """
        starting = asyncio.create_task(
            asyncio.to_thread(self._start, self._queue.store, self.settings.max_memory_bytes)
        )
        try:
            process = await asyncio.shield(starting)
            while (code := process.poll()) is None:
                await asyncio.sleep(POLL_S)
        finally:
            # A builder that starts at the moment of the cancellation is stopped too.
            await asyncio.to_thread(_stop, await starting)
        if code not in (0, BUSY):
            log.warning(
                "the builder ended with %d; `.builds/builder.log` of the store says why", code
            )
        return code


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the builder to return its build to the queue and end. Kill it after STOP_S."""
    if process.stdin is not None:
        process.stdin.close()  # the builder ends at the end of its standard input
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    if process.poll() is None:
        process.kill()
        process.wait()


def build_loading_error(status: BuildStatus) -> ModelLoading:
    """Build the error for a model whose build has not ended."""
    percent = "" if status.percent is None else f", {status.percent} %"
    if status.estimated_time is None:
        when = "No build of this server was measured yet, so the time it takes is not known"
    else:
        when = f"It is ready in about {status.estimated_time:.0f} s"
    return ModelLoading(
        f"Model {status.id} is being built ({status.state}{percent}). {when}; "
        f"see /status/{status.id}",
        estimated_time_s=status.estimated_time,
    )
