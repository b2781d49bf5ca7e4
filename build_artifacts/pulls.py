"""Builds from the queue of a store: run one build, or all waiting builds.

The store has a record of each build with the current step. Requests and commands that wait for a
build read its record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

from build_artifacts.build_devices import fit_to_host
from build_artifacts.demo import DEMO_GPU_SOURCE, DEMO_MODELS, DEMO_SOURCE, find_demo_model
from build_artifacts.errors import BuildError, is_write_failure
from build_artifacts.pipeline import BuildRequest, BuildResult, build, find_sealed
from build_artifacts.presets import QUICK
from build_artifacts.progress import BuildProgress, BuildStep
from build_artifacts.sources.hub import Hub
from deployments.builds.queue import BuildClaim, BuildQueue
from deployments.builds.record import ENDS, BuildRecord, BuildState
from deployments.errors import ServeError, StoreNotWritable

POLL_S = 0.5  # time between two reads of a record that another process writes
# Build state by step name. All other steps belong to the state `building`.
STATES = {
    "resolve": BuildState.PULLING,
    "gate": BuildState.VERIFYING,
    "seal": BuildState.VERIFYING,
}


class RecordedProgress(BuildProgress):
    """Progress that also writes every step to the record of the build."""

    def __init__(
        self, stream: TextIO, claim: BuildClaim, read_percent: Callable[[], int | None]
    ) -> None:
        super().__init__(stream, read_percent)
        self._claim = claim

    @contextmanager
    def step(self, name: str, detail: str) -> Iterator[BuildStep]:
        self._claim.enter(STATES.get(name, BuildState.BUILDING), f"{name} {detail}")
        with super().step(name, detail) as step:
            yield step

    def set_source_bytes(self, size: int) -> None:
        self._claim.set_size(size)


def drain(queue: BuildQueue, stream: TextIO) -> int | None:
    """Run all waiting builds in order, and print the reasons of failures.

    Return the number of failed builds; None if another process already runs the waiting builds. A
    ServeError ends one build only. StoreNotWritable and other exceptions are raised at once, and
    the waiting builds stay in the queue.
    """
    failed = 0
    with queue.drain_lock() as free:
        if not free:
            return None
        while waiting := [one for one in queue.pending() if not one.is_running]:
            model_id = waiting[0].id
            try:
                pull(queue, model_id, stream)
            except StoreNotWritable:  # the build stays queued; at once, it would fail again
                raise
            except ServeError:  # the record has the reason
                pass
            record = queue.read(model_id)
            if record is not None and record.state is BuildState.FAILED:
                print(f"error: {model_id} is not built: {record.reason}", file=stream, flush=True)
                failed += 1
        return failed


def pull(
    queue: BuildQueue, model_id: str, stream: TextIO, hub: Hub | None = None
) -> BuildResult | None:
    """Run the queued build of a model. Return None if this process cannot run the build.

    This is the case if the model has no unfinished build, if another process runs the build, or if
    too many processes crashed during the build. A failure is written to the record of the build,
    then raised. MemoryError becomes BuildError. On KeyboardInterrupt, the build goes back to the
    queue, and the exception is raised.
    """
    with queue.claim(model_id) as claim:
        if claim is None:
            return None
        print(f"building {model_id} from {claim.record.source}", file=stream, flush=True)
        try:
            request = plan_build(claim.record, queue.store)
            progress = RecordedProgress(stream, claim, partial(_read_percent, queue, model_id))
            result = build(request, progress, hub=hub)
        except ServeError as error:
            hint = f". Hint: {error.hint}" if isinstance(error, BuildError) else ""
            claim.fail(f"{error.message}{hint}")
            raise
        except KeyboardInterrupt:
            claim.interrupt()
            raise
        except MemoryError as error:
            claim.fail("the build needs more memory than it may use")
            raise BuildError(
                f"the build of {model_id} needs more memory than it may use",
                hint="raise `builds.max_memory_bytes` of serve_config.yaml",
            ) from error
        except Exception as error:
            claim.fail(_describe_failure(error))
            raise
        claim.finish(result.manifest.version, was_stored=result.already_built)
        return result


def _describe_failure(error: Exception) -> str:
    """Return the reason for the record, which clients read: without the paths of this host."""
    if is_write_failure(error):
        return "the builder cannot write its files: check space and permissions of the store"
    if isinstance(error, OSError) and error.strerror:
        return f"the builder cannot use a file: {error.strerror}; see its log"
    return f"unexpected failure ({type(error).__name__}); see the log of the builder"


def plan_build(record: BuildRecord, store: Path) -> BuildRequest:
    """Return the build request of a record, without tuning.

    The encoder deployments measure the graphs later, at low priority.
    """
    if record.source in (DEMO_SOURCE, DEMO_GPU_SOURCE):
        model = find_demo_model(record.id)
        request = model.request(store, with_gpu=record.source == DEMO_GPU_SOURCE)
    else:
        recipe = fit_to_host(QUICK)
        request = BuildRequest(
            ref=record.source, store=store, id=record.id, task=record.task, recipe=recipe
        )
    return replace(request, budget=replace(request.budget, tune_seconds=0.0))


def pull_or_follow(queue: BuildQueue, model_id: str, stream: TextIO) -> None:
    """Run the queued build of a model, or wait for the process that runs it.

    Raises BuildError if the build fails in this process. If the build fails in another process, the
    function returns, and only the record of the build has the error.
    """
    while (record := queue.read(model_id)) and not record.has_ended:
        if pull(queue, model_id, stream) is None:
            _follow(queue, model_id, stream)


def _follow(queue: BuildQueue, model_id: str, stream: TextIO) -> None:
    """Show each step of a build until the build or its process has ended."""
    progress = BuildProgress(stream, partial(_read_percent, queue, model_id))
    progress.begin()
    try:
        while (status := queue.status(model_id)) and status.state not in ENDS:
            progress.show(f"{status.state} {status.step}".rstrip())
            if status.state is BuildState.QUEUED and status.reason:
                return  # no process runs this build
            time.sleep(POLL_S)
    finally:
        progress.end()


def _read_percent(queue: BuildQueue, model_id: str) -> int | None:
    status = queue.status(model_id)
    return None if status is None else status.percent


def build_first_demo_model(store: Path, stream: TextIO, *, with_gpu: bool) -> list[BuildResult]:
    """Queue all missing demo models. If no demo model is stored, build the first one here.

    Return the build that ran here, if any. Raises BuildError if it fails.
    """
    missing = [
        model
        for model in DEMO_MODELS
        if find_sealed(store, model.id, model.version(store, with_gpu=with_gpu)) is None
    ]
    queue, source = BuildQueue(store), DEMO_GPU_SOURCE if with_gpu else DEMO_SOURCE
    for model in missing:
        queue.submit(model.id, source)
    if len(missing) < len(DEMO_MODELS):
        return []
    result = pull(queue, missing[0].id, stream)
    return [] if result is None else [result]
