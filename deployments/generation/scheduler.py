"""Scheduler of one decoder with continuous batching: jobs join and leave between steps.

A step drops cancelled jobs, activates waiting ones, prefills chunks of prompts and runs one decode
step for all prefilled jobs. The loop runs on a thread of its own and publishes the events of all
jobs together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from deployments.config import SchedulingSettings
from deployments.deadlines import is_expired
from deployments.engines.decoder import DecoderEngine
from deployments.errors import (
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    ServeError,
    hide_details,
)
from deployments.generation.job import Job
from deployments.generation.step_executor import NO_OUTPUT, JobEvent, StepExecutor, StepOutput
from deployments.health import WorkerHealth
from deployments.records import StepRecord, StepRecorder

log = logging.getLogger("ray.serve.hundredfold")

Publish = Callable[[Sequence[JobEvent]], None]


class GenerationLoop:
    """The queue and the step loop of one decoder. `publish` is called from the loop's thread."""

    def __init__(
        self,
        decoder: DecoderEngine,
        settings: SchedulingSettings,
        publish: Publish,
        recorder: StepRecorder,
        model_id: str,
    ) -> None:
        self.settings = settings
        self.health = WorkerHealth(model_id)
        self._decoder = decoder
        self._publish = publish
        self._recorder = recorder
        self._model_id = model_id
        self._executor = StepExecutor(decoder, self._next_waiting, self.health)
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()  # guarded by _changed
        self._cancelled: set[int] = set()  # guarded by _changed
        self._is_closing = False  # guarded by _changed
        self._thread = threading.Thread(target=self._run, name=f"generate {model_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises Overloaded if the queue is full or the loop is closing, ModelUnavailable in
        quarantine.
        """
        limit = self.settings.max_waiting_requests
        with self._changed:
            if self._is_closing:
                raise Overloaded("this replica is stopping; retry")
            if len(self._waiting) >= limit:
                raise Overloaded(
                    f"The generation queue is full: {len(self._waiting)} requests wait, the "
                    f"maximum is {limit}. Retry later."
                )
            self.health.admit()
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Free the slots of a job before the next step and publish no more events of it.

        Has no effect on finished jobs.
        """
        with self._changed:
            self._cancelled.add(job.number)
            self._changed.notify()

    @property
    def load(self) -> tuple[int, int]:
        """The numbers of active and of waiting jobs."""
        return len(self._executor.active), len(self._waiting)

    def check_thread(self) -> None:
        """Raise EngineFailed if the thread ended by itself."""
        if not (self._thread.is_alive() or self._is_closing or self._thread.ident is None):
            raise EngineFailed(f"{self._model_id}: the thread of its steps has ended")

    def close(self) -> None:
        """Finish all active and waiting jobs, then stop. Blocks."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while self._wait_for_work():
            with self.health.running():
                try:
                    self._step()
                except ServeError as error:
                    log.error("a step of %s failed", self._model_id, exc_info=error)
                    self._fail(hide_details(error))
                except Exception as error:
                    log.error("bug: a step of %s raised", self._model_id, exc_info=error)
                    self._fail(hide_details(error))
                self._publish_events()

    def _wait_for_work(self) -> bool:
        """Return False once the loop must end."""
        with self._changed:
            while not (self._executor.active or self._waiting):
                self._cancelled.clear()
                if self._is_closing:
                    return False
                self._changed.wait()
        return True

    def _step(self) -> None:
        started_s = time.perf_counter()
        active_before = len(self._executor.active)
        self._drop_cancelled()
        self._executor.admit()
        prefilled = self._executor.prefill(self.settings)
        if prefilled:
            self._publish_events()  # first tokens do not wait for the decode step
        output = self._executor.decode(self.settings)
        # Also record a step that only ended jobs, so that the gauges return to zero.
        if prefilled or output.tokens or len(self._executor.active) != active_before:
            self._record(prefilled, output, time.perf_counter() - started_s)

    def _record(self, prefilled: int, output: StepOutput, elapsed_s: float) -> None:
        self._recorder.record(
            StepRecord(
                model=self._model_id,
                compute=self._decoder.info.compute_type,
                prompt_tokens=prefilled,
                answer_tokens=output.tokens,
                draft_tokens=output.draft_tokens,
                accepted_draft_tokens=output.accepted_draft_tokens,
                active=len(self._executor.active),
                waiting=len(self._waiting),
                step_s=elapsed_s,
            )
        )

    def _drop_cancelled(self) -> None:
        """Release cancelled and expired jobs."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
            expired = [job for job in self._waiting if is_expired(job.deadline_s)]
            dropped = cancelled.union(job.number for job in expired)
            if dropped:
                self._waiting = deque(job for job in self._waiting if job.number not in dropped)
        for number in cancelled & self._executor.active.keys():
            self._executor.release(self._executor.active[number])
        for job in [job for job in self._executor.active.values() if is_expired(job.deadline_s)]:
            self._executor.release(job)
            expired.append(job)
        for job in expired:
            if job.number not in cancelled:
                error = DeadlineExceeded("the answer took longer than its time limit")
                self._executor.events.append(JobEvent(job.number, error))

    def _next_waiting(self, free_slots: int) -> Job | None:
        """Dequeue the first job if it fits `free_slots`; later jobs do not overtake it."""
        with self._changed:
            fits = bool(self._waiting) and self._waiting[0].slot_count <= free_slots
            return self._waiting.popleft() if fits else None

    def _fail(self, error: ServeError) -> None:
        self._executor.fail_all(error)
        self._record(0, NO_OUTPUT, self.health.running_s())  # no job is active now

    def _publish_events(self) -> None:
        events, self._executor.events = self._executor.events, []
        if events:
            self._publish(events)
