"""The queue of builds. It consists of files in the store, so it outlives every process.

<store>/.builds/<organization>--<name>.json   BuildRecord of a model
<store>/.builds/<organization>--<name>.lock   held by the process that builds it
<store>/.builds/.drain.lock                   held by the process that runs the queued builds
<store>/.builds/history.jsonl                 BuildDurations, one line per finished build

A builder is a process that runs queued builds. If a record has a running state but no process holds
its lock, the builder has crashed. The build then counts as queued again. If the server or Ctrl-C
stops a builder, the builder itself returns its build to the queue. The next builder continues after
the last finished step.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from deployments.artifacts.locks import directory_lock, is_locked, try_exclusive_lock
from deployments.artifacts.store import model_directory
from deployments.builds.estimates import BuildStatus, build_status
from deployments.builds.record import BuildDurations, BuildRecord, BuildState
from deployments.errors import Overloaded, StoreNotWritable
from deployments.files import write_atomically
from deployments.watched_file import FileState, read_file_state

log = logging.getLogger("ray.serve.hundredfold")

QUEUE_NAME = ".builds"
DRAIN_LOCK_NAME = ".drain.lock"  # never the lock of a model: no model id starts with a dot
MAX_CRASHES = 3  # a build fails after this many of its builders crashed
MAX_FAILED = 100  # maximum number of records of failed builds, which requests can cause
MAX_QUEUED = 16  # maximum number of builds that wait or run
HISTORY_BYTES = 64 << 10  # bytes that are read from the end of history.jsonl
MAX_REASON_CHARS = 1_000
_CONTINUES = "its builder ended; the build continues after its last finished step"


class BuildQueue:
    """The builds of one store that are queued, run or have ended."""

    def __init__(self, store: Path, now: Callable[[], float] = time.time) -> None:
        self.store = store
        self.directory = store / QUEUE_NAME
        self._now = now
        self._claimed: BuildClaim | None = None
        # Records of ended builds by path, with the states of their files at the last read.
        self._ended: dict[Path, tuple[FileState | None, BuildRecord]] = {}
        self._logged_error = ""  # the last error of the store that was logged

    def submit(
        self, model_id: str, source: str, task: str | None = None, *, max_queued: int = MAX_QUEUED
    ) -> tuple[BuildRecord, bool]:
        """Queue a build. Return its record and whether the build is new.

        Concurrent calls for one model queue only one build, with source and task of the first call.
        Raises ManifestInvalid for an invalid id, Overloaded if `max_queued` builds are queued, or
        StoreNotWritable.
        """
        path = self._record(model_id)
        with self._changing():
            found = self.read(model_id)
            if found is not None and not found.has_ended:
                return found, False
            if len(self.pending()) >= max_queued:
                raise Overloaded(f"{max_queued} builds are queued, the maximum; retry later")
            now_s = self._now()
            record = BuildRecord(
                id=model_id, source=source, task=task, queued_s=now_s, changed_s=now_s
            )
            self._write(path, record)
            self._forget_failures()
        return record, True

    def _forget_failures(self) -> None:
        """Remove the records of failed builds, except the newest MAX_FAILED."""
        failed = [each for each in self._list() if each.state is BuildState.FAILED]
        failed.sort(key=lambda each: each.changed_s)
        for record in failed[:-MAX_FAILED]:
            self._record(record.id).unlink(missing_ok=True)

    def read(self, model_id: str) -> BuildRecord | None:
        """Return the record of the model's last build; None if there is none or it is unreadable.

        Raises ManifestInvalid for an invalid id.
        """
        return self._read(self._record(model_id))

    def pending(self) -> list[BuildRecord]:
        """List the builds that have not ended, in the order of their submission."""
        found = [record for record in self._list() if not record.has_ended]
        return sorted(found, key=lambda record: record.queued_s)

    def _list(self) -> list[BuildRecord]:
        """Read the last builds of all models.

        Waiting requests cause this often, and the store has a record of each model ever built. So
        the record of an ended build is read again only after a change.
        """
        ended: dict[Path, tuple[FileState | None, BuildRecord]] = {}
        found = []
        for path in self.directory.glob("*.json"):
            state = read_file_state(path)  # before the record, so that no change is missed
            known_state, record = self._ended.get(path, (None, None))
            if record is None or known_state != state:
                record = self._read(path)
            if record is not None:
                found.append(record)
                if record.has_ended:
                    ended[path] = state, record
        self._ended = ended
        return found

    def needs_builder(self) -> bool:
        """Return whether a build waits, but no process runs the queued builds."""
        is_drained = is_locked(self.directory / DRAIN_LOCK_NAME)
        return not is_drained and any(not one.is_running for one in self.pending())

    def status(self, model_id: str) -> BuildStatus | None:
        """Describe the last build of a model; return None as `read` does.

        Raises ManifestInvalid for an invalid id.
        """
        record = self.read(model_id)
        if record is None:
            return None
        pending = [] if record.has_ended else self.pending()
        before = [one for one in pending if one.queued_s < record.queued_s]
        return build_status(record, self.history(), before, self._now())

    def history(self) -> list[BuildDurations]:
        """Return the durations of the newest finished builds."""
        try:
            with (self.directory / "history.jsonl").open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - HISTORY_BYTES))
                lines = file.read().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:  # the first line may be incomplete
            with suppress(ValidationError):
                found.append(BuildDurations.model_validate_json(line))
        return found

    def forget(self, model_id: str) -> bool:
        """Remove the record of a model and return True. If its build runs, return False."""
        with self._changing(), try_exclusive_lock(self._lock(model_id)) as free:
            if free:
                self._record(model_id).unlink(missing_ok=True)
            return free

    @contextmanager
    def drain_lock(self) -> Iterator[bool]:
        """Hold the lock of the process that runs the queued builds; yield True.

        Yields False if another process holds the lock. Raises StoreNotWritable if the directory of
        the queue cannot be created.
        """
        with self._store_errors():
            self.directory.mkdir(parents=True, exist_ok=True)
        with try_exclusive_lock(self.directory / DRAIN_LOCK_NAME) as free:
            yield free

    @contextmanager
    def claim(self, model_id: str) -> Iterator[BuildClaim | None]:
        """Hold the lock of a model's build and yield the claim on the build.

        Yields None if another process holds the lock, or if the record of the build is unreadable,
        missing or finished. If MAX_CRASHES builders crashed during the build, marks the build as
        failed and yields None.
        """
        with try_exclusive_lock(self._lock(model_id)) as free:
            path = self._record(model_id)
            record = self._parse(path) if free else None
            if record is None or record.has_ended:
                yield None
                return
            claim = BuildClaim(record, lambda changed: self._write(path, changed), self._now)
            if record.crashes >= MAX_CRASHES:
                claim.fail(
                    f"its builder ended {record.crashes} times without a message, perhaps for "
                    "lack of memory"
                )
                yield None
                return
            self._claimed = claim  # before `begin`, so that `interrupt` works during `begin` too
            try:
                claim.begin()
                yield claim
            finally:
                self._claimed = None
            if claim.is_measured:
                self._remember(claim.record)

    def interrupt(self) -> None:
        """Interrupt the build that this object has claimed, if any. Callable from any thread."""
        claim = self._claimed
        if claim is not None:
            claim.interrupt()

    def _remember(self, record: BuildRecord) -> None:
        durations = BuildDurations(id=record.id, size=record.size or 0, seconds=record.spent_s)
        try:
            with (self.directory / "history.jsonl").open("ab") as file:
                file.write(durations.model_dump_json().encode() + b"\n")
        except OSError as error:  # only later estimates need the durations
            log.warning("the durations of a build are not stored: %s", error)

    def _read(self, path: Path) -> BuildRecord | None:
        record = self._parse(path)
        if record is None or not record.is_running or is_locked(path.with_suffix(".lock")):
            return record
        record = self._parse(path)  # the build may have ended between reading record and lock
        if record is None or not record.is_running:
            return record
        return record.enter(BuildState.QUEUED, self._now(), reason=_CONTINUES)

    @staticmethod
    def _parse(path: Path) -> BuildRecord | None:
        try:
            return BuildRecord.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            log.warning("the record of a build is unreadable: %s: %s", path, error)
            return None

    def _write(self, path: Path, record: BuildRecord) -> None:
        with self._store_errors():
            write_atomically(path, record.model_dump_json().encode())

    def _record(self, model_id: str) -> Path:
        return self.directory / f"{model_directory(self.store, model_id).name}.json"

    def _lock(self, model_id: str) -> Path:
        return self._record(model_id).with_suffix(".lock")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._store_errors():
            self.directory.mkdir(parents=True, exist_ok=True)
            with directory_lock(self.directory):
                yield

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            reason = exc.strerror or type(exc).__name__
            # The log names the path of the store. The error may reach clients and must not name it.
            # Requests can repeat the error as often as they like, so it is logged once.
            if reason != self._logged_error:
                self._logged_error = reason
                log.warning("cannot write to the store %s: %s", self.store, exc)
            raise StoreNotWritable(
                f"cannot write to the store: {reason}. Check its space and permissions"
            ) from exc


class BuildClaim:
    """Write access to the record of a build, for the process that holds the lock of the build.

    Each change is written at once.
    """

    def __init__(
        self,
        record: BuildRecord,
        write: Callable[[BuildRecord], None],
        now: Callable[[], float],
    ) -> None:
        self.record = record
        self.is_measured = False  # whether later estimates use the durations of the build
        self._write = write
        self._now = now
        self._lock = threading.RLock()
        self._has_begun = False
        self._is_interrupted = False

    def begin(self) -> None:
        """Count an attempt and reset the durations of earlier attempts."""
        with self._lock:
            self._has_begun = True
            attempts = self.record.attempts + 1
            self._change(BuildState.PULLING, attempts=attempts, reason="", spent_s={})

    def enter(self, state: BuildState, step: str) -> None:
        """Record the stage and step that begin."""
        self._change(state, step=step)

    def set_size(self, size: int) -> None:
        """Record the bytes of the source. Estimates use builds of similar size."""
        self._change(self.record.state, size=size)

    def finish(self, version: str, *, was_stored: bool = False) -> None:
        """Record that the version is ready.

        Estimates do not use the durations if the version `was_stored` before the build, or if the
        build took several attempts.
        """
        self._change(BuildState.READY, step="", version=version)
        self.is_measured = not was_stored and self.record.attempts == 1

    def fail(self, reason: str) -> None:
        self._change(BuildState.FAILED, step="", reason=reason[:MAX_REASON_CHARS])

    def interrupt(self) -> None:
        """Return an unfinished build to the queue, because its builder is being stopped.

        The stopped builder does not count as crashed. Later changes of the claim are ignored.
        """
        with self._lock:
            if self._has_begun and not self.record.has_ended:
                interruptions = self.record.interruptions + 1
                self._change(
                    BuildState.QUEUED, step="", reason=_CONTINUES, interruptions=interruptions
                )
            self._is_interrupted = True

    def _change(self, state: BuildState, **changes: object) -> None:
        with self._lock:
            if self._is_interrupted:
                return
            self.record = self.record.enter(state, self._now(), **changes)
            self._write(self.record)
